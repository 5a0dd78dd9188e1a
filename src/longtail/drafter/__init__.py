"""Drafters: EAGLE layers on the target's features, and suffixes of history."""
