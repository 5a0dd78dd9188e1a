"""`longtail bench e2e`."""
