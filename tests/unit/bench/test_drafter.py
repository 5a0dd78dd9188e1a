"""The benchmark of drafter training: that its layouts are the same work, and that it runs."""

import argparse
import json

import pytest

from longtail.bench.training import drafter
from longtail.bench.training.learner import Workload


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["eagle1", "eagle3"])
def test_every_layout_makes_the_same_gradient(recipe: str) -> None:
    work = Workload(sequences=6, rows=3, budget=200, threads=1, scale=0.05)
    assert drafter.gradient_gap(work, recipe, 2) < 1e-10


@pytest.mark.slow
def test_the_last_line_is_json_with_the_ratio(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longtail.bench.training.learner.MEDIAN", 6)
    parser = argparse.ArgumentParser()
    drafter.add_arguments(parser)
    words = ["--sequences=6", "--rows=3", "--budget=100", "--repeats=1", "--unroll-steps=2"]
    drafter.run(parser.parse_args(words))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["packed_ratio"] > 0
    assert set(result["samples_per_second"]) == set(drafter.LAYOUTS)
