"""Hugging Face directories: configuration, weights, tokenizer."""
