"""Spot training: gains and their forecast, the end of training, and merges."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longtail.drafter.training.buffer import DrafterBuffer
from longtail.drafter.training.replica_gain import DrafterGain, SpotEnd
from longtail.drafter.weights import DrafterWeights
from longtail.rl.packing import pack_sequences
from support.spot_training import SETTINGS, SpotSetup, counting, make_buffer, replica

ROLLOUT_S = 20.0
amounts = st.floats(0.01, 100.0)


@pytest.mark.slow
def test_the_replica_is_the_one_with_the_largest_gain() -> None:
    room = SpotSetup()
    report = room.train(lambda: len(room.measured) == 4)
    assert report.reason is SpotEnd.STOPPED
    assert report.num_steps == 12
    best = report.replica
    assert best is not None
    assert best.gain > 0.1
    assert best.gain == max(replica.gain for replica in room.measured)
    seconds = [replica.seconds for replica in room.measured]
    assert seconds == sorted(seconds)
    assert 0.0 < seconds[-1] <= report.seconds
    assert best.base_version == 1
    assert 0 < best.num_tokens <= report.num_tokens
    texts = pack_sequences(room.buffer.heldout(60, max_len=24), 24)
    trainer, measured = room.spot._trainer, []
    for weights in (room.published.tensors, best.weights):
        trainer.load_weights(weights)
        measured.append(trainer.evaluate(texts, SETTINGS.num_depths).accept_len)
    assert [best.base_accept_len, best.accept_len] == measured


def test_without_held_out_text_a_replica_is_unmeasured() -> None:
    room = SpotSetup()
    held = {text.tokens for text in make_buffer().heldout(10**6)}
    room.buffer = DrafterBuffer(10**6, seed=4)
    room.buffer.add(t for t in make_buffer().snapshots() if t.tokens not in held)
    report = room.train(lambda: len(room.measured) == 2)
    assert report.replica is not None
    assert math.isnan(report.replica.gain)
    assert not report.replica.gain > -1.0


def test_an_interval_without_texts_ends_at_once() -> None:
    room = SpotSetup()
    short = replace(counting(1, 3), prompt_len=1)  # a draft of two tokens needs four
    for texts in ([], [counting(1, 3)], [short]):
        room.buffer = DrafterBuffer(10**6, seed=4)
        room.buffer.add(texts)
        report = room.train(lambda: False)
        assert (report.reason, report.num_steps) == (SpotEnd.NO_SEQUENCES, 0)
    assert room.num_passes == 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["target", "replica", "published"])
def test_a_nan_discards_the_replica_and_raises_nothing(where: str) -> None:
    room = SpotSetup(replace(SETTINGS, measure_every=1 if where == "replica" else 100))
    room.train(lambda: room.spot._trainer.steps == 2)
    with torch.no_grad():
        if where == "target":
            room.target.norm.weight[0] = float("nan")
        elif where == "replica":
            room.layer.fc.weight[0, 0] = float("inf")
        else:
            broken = {n: t.clone() for n, t in room.published.tensors.items()}
            broken["fc.weight"][0, 0] = float("nan")
            room.published = DrafterWeights(version=2, tensors=broken)
            room.spot.begin(room.published)
    report = room.train(lambda: False)
    assert (report.reason, report.num_steps, report.replica) == (SpotEnd.NOT_FINITE, 0, None)
    assert room.tensors().keys() == {f"layer/{name}" for name in room.published.tensors}
    for name, tensor in room.published.tensors.items():
        assert torch.equal(room.tensors()[f"layer/{name}"].nan_to_num(7), tensor.nan_to_num(7))
    assert room.spot._trainer.steps == 0


@given(st.lists(st.tuples(st.floats(-0.5, 2.0), amounts), max_size=6), amounts, amounts)
def test_a_gain_is_positive_rises_with_the_time_and_never_exceeds_the_rollouts(
    seen, seconds, rollout_s
):
    gain = DrafterGain()
    for base, (rise, took_s) in enumerate(seen):
        gain.record(0, replica(rise, took_s, base=base))
    found = gain.gain_s(seconds, rollout_s)
    assert 0.0 < found <= gain.gain_s(2 * seconds, rollout_s) * (1 + 1e-12)
    assert found <= 3 * rollout_s
    assert gain.gain_s(0.0, rollout_s) == 0.0
    assert gain.gain_s(seconds, 2 * rollout_s) == pytest.approx(2 * found)


def test_each_rise_and_each_second_is_counted_once():
    """A candidate is read several times, and its successor has its rise and its seconds."""
    often, once = DrafterGain(), DrafterGain()
    for one in (replica(0.1, 2.0), replica(0.1, 2.0), replica(0.3, 5.0), replica(0.3, 5.0)):
        often.record(1, one)
    once.record(1, replica(0.3, 5.0))
    assert often.gain_s(1.0, ROLLOUT_S) == pytest.approx(once.gain_s(1.0, ROLLOUT_S))
    once.record(1, replica(0.3, 5.0, base=1))
    assert often.gain_s(1.0, ROLLOUT_S) != pytest.approx(once.gain_s(1.0, ROLLOUT_S), rel=1e-3)


@pytest.mark.parametrize("nothing", [-0.1, 0.0, math.nan])
def test_a_drafter_that_rises_no_more_is_paused_and_tried_again(nothing):
    gain, trained = DrafterGain(), list[bool]()
    for rollout in range(40):
        gain.begin_rollout()
        share_s = gain.share_s(ROLLOUT_S)
        trained.append(share_s > 0.0)
        if share_s:
            gain.record(0, replica(nothing, share_s, base=rollout))
    assert trained[0]
    assert 2 <= sum(trained) <= 8, "a fifth of a tenth of the time at most"
    assert any(trained[20:])


def test_a_drafter_that_rises_is_trained_on_and_pays_more_in_longer_rollouts():
    gain = DrafterGain()
    for rollout in range(10):
        gain.begin_rollout()
        share_s = gain.share_s(ROLLOUT_S)
        assert share_s == pytest.approx(0.1 * ROLLOUT_S)
        gain.record(0, replica(0.1, share_s, base=rollout))
    assert gain.share_s(1.0) == 0.0, "a second of rollouts is not worth it"
