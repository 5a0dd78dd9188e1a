"""Drafters (ridge block, history, EAGLE-1, EAGLE-3), their training, and their file formats."""
