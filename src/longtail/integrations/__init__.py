"""longtail inside other trainers and engines: one package or module for each."""
