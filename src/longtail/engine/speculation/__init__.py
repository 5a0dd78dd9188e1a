"""The engine side of speculative decoding."""
