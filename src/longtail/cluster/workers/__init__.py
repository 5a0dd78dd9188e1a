"""Worker processes: pool, states, supervision, and Ray."""
