"""`longtail bench rollout`."""
