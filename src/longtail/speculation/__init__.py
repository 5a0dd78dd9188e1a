"""Speculation as mathematics: draft trees, verification, confidence. No model, no clock."""
