"""Drafter training: texts, replicas, spot training."""
