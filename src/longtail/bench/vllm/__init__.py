"""`longtail bench vllm`."""
