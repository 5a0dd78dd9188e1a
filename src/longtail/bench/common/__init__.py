"""Options, timing, cards and models that several benchmarks share."""
