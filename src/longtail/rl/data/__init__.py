"""Prompts and examples: sources, tokenized rows, request batches."""
