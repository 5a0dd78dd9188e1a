"""Drafter training: sequences, replicas, spot training."""
