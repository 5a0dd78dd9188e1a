"""Kinds of work of workers in a rollout: how each starts, is polled, ends and what it returns."""
