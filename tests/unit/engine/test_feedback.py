"""The time at which feedback is applied, and the step that its seconds count towards.

Time is simulated: a pass takes 10, a proposal 2, drafters' learning 3, a tuner's learning 4. On a
"gpu" the pass runs while the host continues; on a "cpu" `launch` returns after the pass.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from longtail.engine.engine import RolloutEngine
from longtail.engine.report import StepReport
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.planner import StepFeedback
from longtail.engine.speculation.speculator import Speculation
from longtail.engine.step.runner import Launched, ModelRunner, StepClock
from longtail.speculation.strategy import Strategy
from longtail.tuner.records import Batch, Outcome, Plan
from longtail.tuner.tuner import Tuner
from longtail.types import Request, SamplingParams
from support.drafters import RIGHT, ScriptedDrafter, WatchfulDrafter
from support.fakes import scripted_model, unchecked_shapes

PASS_S, PROPOSAL_S, LEARNING_S, TUNING_S = 10.0, 2.0, 3.0, 4.0


@dataclass
class World:
    """The simulated time, and a log of events."""

    now: float = 0.0
    log: list[str] = field(default_factory=list)

    def happens(self, what: str, takes: float = 0.0) -> None:
        self.log.append(what)
        self.now += takes


class WorldClock(StepClock):
    def __init__(self, world: World) -> None:
        self._world, self._began = world, 0.0

    def begin(self) -> None:
        self._began = self._world.now

    def read(self) -> float:
        return self._world.now - self._began


@dataclass
class Event:
    """Event of a GPU pass that ends at `until`."""

    world: World
    until: float

    def synchronize(self) -> None:
        self.world.now = max(self.world.now, self.until)


class Turns(Tuner):
    """Drafts in two steps of three, and keeps the outcomes."""

    def __init__(self, world: World) -> None:
        self._world, self._step = world, 0
        self.outcomes: list[Outcome] = []

    def plan(self, batch: Batch) -> Plan:
        self._step += 1
        return Plan(strategy=Strategy(depth=2) if self._step % 3 else None)

    def select_nodes(self, batch, plan, proposals):
        self._world.happens("propose")
        return super().select_nodes(batch, plan, proposals)

    def learn(self, outcome: Outcome) -> None:
        self._world.happens("learn", TUNING_S)
        self.outcomes.append(outcome)


class Slow(ScriptedDrafter):
    """Takes PROPOSAL_S for every proposal."""

    world: World

    def draft(self, requests, strategy, noise):
        self.world.now += PROPOSAL_S
        return super().draft(requests, strategy, noise)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[World]:
    """A world in which passes take time on the device of the test."""
    world, device = World(), getattr(request, "param", "cpu")
    launch, wait, send = ModelRunner.launch, Launched.wait, StepFeedback.send_to_drafters

    def launched(*args: object) -> Launched:
        world.happens("launch", PASS_S if device == "cpu" else 0.0)
        done = None if device == "cpu" else Event(world, world.now + PASS_S)
        return dataclasses.replace(launch(*args), done=done)

    def waited(each: Launched) -> object:
        out = wait(each)
        world.happens("wait")
        return out

    def sent(feedback: StepFeedback, drafters: Sequence[WatchfulDrafter]) -> None:
        send(feedback, drafters)
        world.now += LEARNING_S if feedback.step.timings else 0.0

    monkeypatch.setattr(ModelRunner, "launch", launched)
    monkeypatch.setattr(Launched, "wait", waited)
    monkeypatch.setattr(StepFeedback, "send_to_drafters", sent)
    with unchecked_shapes():
        yield world


def make_engine(world: World) -> tuple[RolloutEngine, ScriptedDrafter, Turns]:
    """Two requests of a counting model, with correct drafts."""
    limits = EngineLimits(max_running=4, max_step_tokens=60, max_len=64)
    engine = RolloutEngine(scripted_model(60), lambda tokens: "", limits)
    drafter = Slow({"a": range(60), "b": range(60)}, RIGHT, vocab_size=60, informed=False)
    drafter.world, tuner = world, Turns(world)
    engine.speculate(
        Speculation(drafters=(drafter,), tuner=tuner, guarded=False, clock=WorldClock(world))
    )
    for name in ("a", "b"):
        sampling = SamplingParams(max_tokens=30)
        engine.submit(
            Request(request_id=name, prompt_tokens=(0, 1), noise_key=0, sampling=sampling)
        )
    return engine, drafter, tuner


def to_the_end(engine: RolloutEngine) -> list[StepReport]:
    steps = []
    while engine.num_unfinished:
        steps.append(engine.step())
    return steps


@pytest.mark.parametrize("world", ["cpu", "gpu"], indirect=True)
def test_feedback_is_applied_while_the_next_step_is_computed(world):
    """All devices use the same order; the last feedback is applied when no request is left."""
    engine, _, tuner = make_engine(world)
    steps = to_the_end(engine)
    done = [event for event in world.log if event != "propose"]
    assert done[:2] == ["launch", "wait"]
    assert done[2:] == ["launch", "learn", "wait"] * (len(steps) - 1) + ["learn"]
    assert len(tuner.outcomes) == len(steps)
    for outcome, step in zip(tuner.outcomes, steps, strict=True):
        assert outcome.num_nodes == sum(each.num_drafted for each in step.verified)
        assert outcome.num_emitted == len(step.emitted) or step is steps[-1]


@pytest.mark.parametrize("world", ["cpu", "gpu"], indirect=True)
def test_learning_seconds_count_towards_the_step_they_learn_from(world, request):
    """On a CPU drafters' learning is a cost of their drafts; on a GPU no step waits for it."""
    engine, _, tuner = make_engine(world)
    to_the_end(engine)
    exposed = LEARNING_S if request.node.callspec.params["world"] == "cpu" else 0.0
    kinds = set()
    for outcome in tuner.outcomes[:-1]:  # the last feedback is applied outside of any step
        drafted = bool(outcome.timings)
        kinds.add(drafted)
        assert outcome.verify_s == PASS_S + exposed * drafted
        assert [each.seconds for each in outcome.timings] == [PROPOSAL_S] * drafted
    assert kinds == {True, False}


def stop_all(engine: RolloutEngine) -> None:
    engine.abort("a")
    engine.abort("b")


@pytest.mark.parametrize(
    "change",
    [lambda engine: engine.speculate(None), RolloutEngine.reset_estimates, stop_all],
    ids=["removed", "estimates-reset", "aborted"],
)
def test_pending_feedback_is_applied_before_any_change(world, change: Callable):
    engine, drafter, tuner = make_engine(world)
    steps = [engine.step() for _ in range(3)]
    assert len(tuner.outcomes) == 2
    change(engine)
    assert len(tuner.outcomes) == 3
    verified = [each for step in steps for each in step.verified]
    assert drafter.num_drafts == len(verified) > 0
    assert drafter.num_accepted == sum(each.num_accepted for each in verified)
