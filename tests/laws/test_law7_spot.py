"""Law 7: stopping spot training anywhere loses nothing and delays nothing beyond one micro-step.

Here the drafter's side: wherever a stop comes, finished micro-batches are kept, each is learned
once, and training from there ends where an uninterrupted run does, bit for bit. Counted, not timed:
after the stop no micro-batch is begun.
"""

from collections.abc import Callable

import pytest
import torch

from longtail.drafter.eagle.target_states import Interrupted
from longtail.drafter.eagle.unroll import Pairs
from longtail.drafter.training.replica_gain import SpotEnd
from longtail.drafter.weights import DrafterWeights
from longtail.rl.data.examples import Example
from longtail.rl.packing import pack_sequences
from support.spot_training import SETTINGS, SpotSetup, counting, same, stop_at

NUM_STEPS = 4
LEARNING = (None, 0.02)
"""Matrices by AdamW, and by Muon."""
_NUM_CHUNKS = 1
"""Chunks in which the rows of these micro-batches are scored."""


def _packed():
    """Several micro-batches, one of them without anything to learn."""
    texts = [counting(number, 12 + number) for number in range(5)]
    examples = [Example(tokens=text.tokens, prompt_len=text.prompt_len) for text in texts]
    return pack_sequences([*examples, Example(tokens=tuple(range(30)), prompt_len=30)], 30)


def _after(room: SpotSetup, num_steps: int) -> Callable[[], bool]:
    """Stop between two updates, as soon as `num_steps` are made."""
    return lambda: room.spot._trainer.steps >= num_steps


def _asked(room: SpotSetup, act: Callable[[Callable[[], bool]], object]) -> list[int]:
    """Return the number of begun passes at each call of `stopped`, which is never true."""
    before, passes = room.num_passes, list[int]()

    def stopped() -> bool:
        passes.append(room.num_passes - before)
        return False

    act(stopped)
    return passes


def _passes_more(room: SpotSetup, count: int) -> Callable[[], bool]:
    """Stop after `count` more micro-batches."""
    limit = room.num_passes + count
    return lambda: room.num_passes >= limit


@pytest.mark.parametrize("matrix_rate", LEARNING)
def test_an_update_stopped_anywhere_keeps_what_is_finished(matrix_rate, monkeypatch) -> None:
    """Asked before each micro-batch, in it and before the update; each gradient is added once."""
    whole, asked = (SpotSetup(matrix_rate=matrix_rate) for _ in range(2))
    batch, learned = _packed(), list[float]()
    backward = torch.autograd.backward
    monkeypatch.setattr(
        torch.autograd, "backward", lambda loss: (learned.append(loss.item()), backward(loss))
    )
    passes = _asked(asked, lambda stopped: asked.spot._trainer.step(batch, stopped))
    parts = [packed for packed in batch if Pairs.of(packed).trained.any()]
    layers = len(asked.target.layers)
    # before every micro-batch and the update; in one with a loss before each layer, before the
    # drafter's pass and before each chunk of rows that are scored
    assert len(passes) == len(batch) + 1 + len(parts) * (layers + 1 + _NUM_CHUNKS)
    expected, losses = whole.spot._trainer.step(batch), learned[len(parts) :]
    for call, begun in enumerate(passes):
        stopped = SpotSetup(matrix_rate=matrix_rate)
        before = stopped.tensors()
        learned.clear()
        with pytest.raises(Interrupted):
            stopped.spot._trainer.step(batch, stop_at(call))
        assert stopped.num_passes == begun
        assert same(stopped.tensors(), before), "no weight or moment moves before the update"
        assert learned == losses[: len(learned)]
        assert len(learned) >= begun - 1, "all but the one that was stopped"
        for _ in range(2):  # stopped at once, it stays as it is
            with pytest.raises(Interrupted):
                stopped.spot._trainer.step(batch, stop_at(0))
        assert stopped.spot._trainer.step(batch) == expected
        assert learned == losses, "none twice"
        assert same(stopped.tensors(), whole.tensors())


@pytest.mark.parametrize("matrix_rate", LEARNING)
def test_updates_that_no_measurement_has_seen_are_added_to_a_newer_drafter(matrix_rate) -> None:
    """Also with an update that is stopped in the middle: it goes on from the newer weights."""
    room = SpotSetup(matrix_rate=matrix_rate)
    room.train(_after(room, SETTINGS.measure_every))
    room.train(lambda: len(room.measured) == 1)
    measured = room.measured[0].weights
    room.train(_after(room, SETTINGS.measure_every + 2))
    room.train(_passes_more(room, 2))  # the first one is finished
    left = len(pack_sequences(room.spot._batch, SETTINGS.tokens_per_micro_batch)) - 1
    moved = {name: own - measured[name] for name, own in room.spot._trainer.weights().items()}
    assert any(move.any() for move in moved.values())
    newer = {name: tensor + 0.5 for name, tensor in room.published.tensors.items()}
    room.spot.begin(DrafterWeights(version=2, tensors=newer))
    now = room.spot._trainer.weights()
    assert same(now, {name: newer[name] + moved[name] for name in newer})
    passes = room.num_passes
    room.train(_after(room, SETTINGS.measure_every + 3))
    assert room.num_passes - passes == left


def test_a_measurement_stopped_anywhere_says_nothing() -> None:
    room, batch = SpotSetup(), _packed()
    trainer = room.spot._trainer
    calls = len(_asked(room, lambda stopped: trainer.evaluate(batch, 2, stopped)))
    assert calls > len(batch)
    for call in range(calls):
        with pytest.raises(Interrupted):
            trainer.evaluate(batch, 2, stop_at(call))
    assert trainer.evaluate(batch, 2, stop_at(calls)) == trainer.evaluate(batch, 2)


@pytest.mark.slow
def test_wherever_a_stretch_stops_it_goes_on_as_if_it_had_not() -> None:
    """Every ninth call of `stopped` in the first updates and around a measurement.

    An update that was not made goes on in the next stretch.
    """
    counted, calls = SpotSetup(), []
    ends = {}

    def done() -> bool:
        calls.append(counted.spot._trainer.steps)
        ends.setdefault(calls[-1], counted.tensors())
        return calls[-1] >= NUM_STEPS

    counted.train(done)
    assert len(calls) > 4 * NUM_STEPS  # several micro-batches an update, and a measurement
    for call, steps in list(enumerate(calls))[::9]:
        room = SpotSetup()
        report = room.train(stop_at(call))
        assert (report.reason, report.num_steps) == (SpotEnd.STOPPED, steps)
        assert room.spot._trainer.steps == steps
        assert same(room.tensors(), ends[steps]), f"stopped at call {call}"
        room.train(_after(room, NUM_STEPS))
        assert same(room.tensors(), ends[NUM_STEPS]), f"went on from call {call}"


def test_no_micro_batch_is_begun_after_the_stop() -> None:
    """The word comes in the middle of some pass, of an update or a measurement: it is the last."""
    for num_passes in (0, 1, 6, 17):
        room = SpotSetup()
        report = room.train(lambda room=room, last=num_passes: room.num_passes >= last)
        assert room.num_passes == num_passes
        assert report.reason is SpotEnd.STOPPED


def test_a_stop_while_the_published_drafter_is_measured_leaves_the_replica_in_place() -> None:
    """Then the layer holds other weights for a moment."""
    room = SpotSetup()
    room.train(_after(room, SETTINGS.measure_every))
    before = room.tensors()
    for count in range(1, 4):  # two passes for each of the two drafters
        room.train(_passes_more(room, count))
        assert same(room.tensors(), before)
        assert room.measured == []


def test_texts_that_arrive_while_a_stop_is_asked_for_disturb_nothing() -> None:
    """`stopped` is where a worker looks for messages, and messages bring texts."""
    room, numbers = SpotSetup(), iter(range(100, 200))

    def arriving() -> bool:
        room.buffer.add([counting(next(numbers), 20, step=1)])
        return room.spot._trainer.steps >= 3

    report = room.train(arriving)
    assert (report.reason, report.num_steps) == (SpotEnd.STOPPED, 3)
    assert next(numbers) > 105
