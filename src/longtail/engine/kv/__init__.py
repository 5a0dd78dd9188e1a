"""KV caches: contiguous rows on a CPU, pages on a GPU."""
