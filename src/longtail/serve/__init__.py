"""OpenAI-compatible HTTP: the protocol, the engine behind it, and who may ask."""
