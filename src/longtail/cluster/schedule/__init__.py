"""Decisions about a rollout, from records to records: no clock, no worker, no thread."""
