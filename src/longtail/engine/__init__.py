"""The rollout engine: continuous batching over a KV cache, one flat list of tokens a step."""
