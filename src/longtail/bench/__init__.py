"""Paired, same-run benchmarks; each prints a card and ends with one JSON line."""
