"""Pages and plots of a run."""
