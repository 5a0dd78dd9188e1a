"""OpenAI-compatible HTTP server for one model."""
