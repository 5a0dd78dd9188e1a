"""Speculation in the engine: it plans drafts, keeps their inputs, verifies and queues them."""
