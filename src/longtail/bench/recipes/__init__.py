"""`longtail bench recipes`."""
