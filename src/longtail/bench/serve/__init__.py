"""`longtail bench serve`."""
