"""Feedback of a step is applied in the next one."""

import pytest

from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.engine.step.runner import ModelRunner
from longtail.speculation.strategy import Strategy
from longtail.tuner.records import Batch, Outcome, Plan
from longtail.tuner.tuner import Tuner
from longtail.types import Request, SamplingParams
from support.drafters import RIGHT, ScriptedDrafter
from support.fakes import scripted_model, unchecked_shapes


class Turns(Tuner):
    """Drafts in two steps of three, and keeps the outcomes."""

    def __init__(self, log: list[str]) -> None:
        self._log, self._step = log, 0
        self.outcomes: list[Outcome] = []

    def plan(self, batch: Batch) -> Plan:
        self._step += 1
        return Plan(strategy=Strategy(depth=2) if self._step % 3 else None)

    def learn(self, outcome: Outcome) -> None:
        self._log.append("learn")
        self.outcomes.append(outcome)


def test_feedback_is_applied_once_the_next_step_is_computed(monkeypatch: pytest.MonkeyPatch):
    """The last feedback is applied when no request is left."""
    log: list[str] = []
    true = ModelRunner.run
    monkeypatch.setattr(ModelRunner, "run", lambda *args: log.append("run") or true(*args))
    limits = EngineLimits(max_running=4, max_step_tokens=60, max_len=64)
    engine = RolloutEngine(scripted_model(60), lambda tokens: "", limits)
    drafter = ScriptedDrafter(
        {"a": range(60), "b": range(60)}, RIGHT, vocab_size=60, informed=False
    )
    tuner = Turns(log)
    engine.speculate(Speculation(drafters=(drafter,), tuner=tuner, guarded=False))
    for name in ("a", "b"):
        sampling = SamplingParams(max_tokens=30)
        engine.submit(
            Request(request_id=name, prompt_tokens=(0, 1), noise_key=0, sampling=sampling)
        )
    steps = []
    with unchecked_shapes():
        while engine.num_unfinished:
            steps.append(engine.step())
    assert log == ["run", *["run", "learn"] * (len(steps) - 1), "learn"]
    for outcome, step in zip(tuner.outcomes, steps, strict=True):
        assert outcome.num_nodes == sum(each.num_drafted for each in step.verified)
        assert outcome.num_emitted == len(step.emitted) or step is steps[-1]
    assert sum(outcome.num_nodes for outcome in tuner.outcomes) > 0
