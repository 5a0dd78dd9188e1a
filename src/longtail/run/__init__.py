"""The run directory: checkpoints, metrics, logs, the summary."""
