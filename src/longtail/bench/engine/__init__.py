"""`longtail bench engine`."""
