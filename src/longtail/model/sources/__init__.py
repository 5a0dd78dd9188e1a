"""Sources of models other than a local directory: the hub, GGUF files, and SmolLM2 from a wheel."""
