"""Runs with kills that are chosen, not drawn; `make chaos` draws them for an hour."""

from collections import Counter
from pathlib import Path

import pytest

from end_to_end.chaos import Chaos, Kill, Trial, workshop_with_drafter

PATIENCE = 4.0
"""Tests share their cores."""


def _kills(*plan: tuple[str, str]) -> tuple[Kill, ...]:
    return tuple(Kill(what=what, task=task, call=1, delay_s=0.02) for what, task in plan)


@pytest.fixture
def chaos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chaos:
    monkeypatch.chdir(tmp_path)
    return Chaos(workshop=workshop_with_drafter(tmp_path), patience=PATIENCE)


@pytest.mark.slow
def test_kills_and_signals_change_no_bit(chaos):
    plan = _kills(("driver", "generate"), ("SIGTERM", "learn"), ("driver", "save_policy"))
    trial = Trial(learner="dynamic sampling", drafter="eagle", workers=1, plan=plan)
    chaos.disturb(trial, "run")
    assert sum(chaos.kills.values()) == len(plan)


@pytest.mark.slow
def test_a_run_on_ray_goes_on_without_a_worker_and_ends_with_a_sentence_without_ray(chaos):
    """Episodes of a lost worker are written again; then Ray ends, and the run resumes."""
    pytest.importorskip("ray")
    plan = _kills(("worker", "generate"), ("dashboard agent", "learn"))
    trial = Trial(learner="episodes", drafter="fresh+history", workers=2, plan=plan)
    chaos.disturb(trial, "run")
    assert chaos.kills == Counter(kill.what for kill in plan)
    assert chaos.runs == 2, "Ray's end ends a run; a lost worker ends none"
    rows = chaos.workshop.rollouts("run")
    assert max(len(row["rewards"]) for row in rows) == 3
    assert all(abs(sum(row["rewards"]) - row["reward"]) < 1e-9 for row in rows)
    assert chaos.workshop.metrics("run")[0]["environment/turns"] > 1
