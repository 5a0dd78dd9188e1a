"""Drafters on disk: our layout, and EAGLE's as vLLM and SGLang read it."""
