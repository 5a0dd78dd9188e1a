"""`longtail bench gpu`."""
