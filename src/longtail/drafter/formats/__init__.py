"""Drafters on disk: our layout and those of vLLM, SGLang and speculators."""
