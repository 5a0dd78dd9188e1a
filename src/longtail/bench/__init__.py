"""`longtail bench e2e`, and the card that it shares with the scripts in benchmarks/."""
