"""`longtail bench tuner`."""
