"""`longtail bench trl`."""
