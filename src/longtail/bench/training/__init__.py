"""`longtail bench learner` and `longtail bench drafter`."""
