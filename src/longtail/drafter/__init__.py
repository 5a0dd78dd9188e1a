"""Drafters: EAGLE layers on the target's features, suffixes of history, a small model."""
