"""Spot training: gains, the end of training, and merges."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longtail.drafter.training.buffer import DrafterBuffer
from longtail.drafter.training.replica import Replica, SpotEnd, merge
from longtail.drafter.training.texts import pack_texts
from longtail.drafter.weights import DrafterWeights
from longtail.errors import CheckpointError
from support.spot_training import (
    SETTINGS,
    TEACHING,
    SpotSetup,
    counting,
    make_buffer,
    same,
)


def _replica(value: float | Tensor, num_tokens: int, *, version: int = 1) -> Replica:
    tensor = torch.full((2, 3), value) if isinstance(value, float) else value
    return Replica(
        base_version=version,
        weights={"fc.weight": tensor},
        num_tokens=num_tokens,
        num_steps=1,
        accept_len=2.2,
        base_accept_len=2.0,
    )


@pytest.mark.slow
def test_the_replica_is_the_one_with_the_largest_gain() -> None:
    room = SpotSetup()
    report = room.train(lambda: len(room.measured) == 6)
    assert report.reason is SpotEnd.STOPPED
    assert report.num_steps == 18
    best = report.replica
    assert best is not None
    assert best.gain > 0.1
    gains = [replica.gain for replica in room.measured]
    assert gains == sorted(gains)  # each measurement reports the best so far
    assert best is room.measured[-1]
    assert best.base_version == 1
    assert 0 < best.num_tokens <= report.num_tokens
    texts = pack_texts(room.buffer.heldout(60, max_len=24), 24)
    trainer, measured = room.spot._trainer, []
    for weights in (room.published.tensors, best.weights):
        trainer.load_weights(weights)
        measured.append(trainer.evaluate(texts, SETTINGS.num_depths).accept_len)
    assert [best.base_accept_len, best.accept_len] == measured


@pytest.mark.slow
def test_training_ends_when_there_is_no_more_gain() -> None:
    """Without a learning rate there is no gain, so the second measurement ends training."""
    idle = replace(TEACHING, optimizer=TEACHING.optimizer.model_copy(update={"learning_rate": 0.0}))
    room = SpotSetup(replace(SETTINGS, trainer=idle, min_gain=0.01, patience=2))
    report = room.train(lambda: False)
    assert report.reason is SpotEnd.NO_GAIN
    assert report.num_steps == 2 * SETTINGS.measure_every
    assert report.replica is not None
    assert report.replica.gain == 0.0


def test_without_held_out_text_a_replica_is_unmeasured() -> None:
    room = SpotSetup()
    held = {text.tokens for text in make_buffer().heldout(10**6)}
    room.buffer = DrafterBuffer(10**6, seed=4)
    room.buffer.add(t for t in (counting(n, 9 + n % 20) for n in range(30)) if t.tokens not in held)
    report = room.train(lambda: len(room.measured) == 2)
    assert report.replica is room.measured[-1]
    assert report.replica.num_steps == 6
    assert math.isnan(report.replica.gain)
    assert not report.replica.gain > -1.0


def test_an_interval_without_texts_ends_at_once() -> None:
    room = SpotSetup()
    short = replace(counting(1, 3), prompt_len=1)  # a draft of two tokens needs four
    for texts in ([], [counting(1, 3)], [short]):
        room.buffer = DrafterBuffer(10**6, seed=4)
        room.buffer.add(texts)
        report = room.train(lambda: False)
        assert (report.reason, report.num_steps) == (SpotEnd.NO_TEXTS, 0)
    assert room.num_passes == 0


def test_the_same_version_continues_and_another_starts_from_its_weights() -> None:
    room = SpotSetup()
    room.train(lambda: room.spot._trainer.steps == 2)
    trained = room.tensors()
    room.spot.begin(room.published)
    assert same(room.tensors(), trained)
    merged = DrafterWeights(
        version=2, tensors={n: t + 0.5 for n, t in room.published.tensors.items()}
    )
    room.spot.begin(merged)
    now = room.tensors()
    assert room.spot.base_version == 2
    for name, tensor in merged.tensors.items():
        assert torch.equal(now[f"layer/{name}"], tensor)
    moments = {name for name in trained if name.startswith("optimizer/")}
    assert moments
    assert all(torch.equal(now[name], trained[name]) for name in moments)


def test_a_published_drafter_of_another_shape_is_refused_and_the_replica_stays() -> None:
    room = SpotSetup()
    before = room.tensors()
    wrong = {n: t[:1] for n, t in room.published.tensors.items()}
    with pytest.raises(CheckpointError, match="another drafter"):
        room.spot.begin(DrafterWeights(version=2, tensors=wrong))
    assert room.spot.base_version == 1
    assert same(room.tensors(), before)


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


@pytest.mark.slow
def test_a_renewed_draft_vocabulary_keeps_the_updates_and_other_weights_drop_them() -> None:
    room = SpotSetup()
    room.train(lambda: room.spot._trainer.steps == 2)
    trained = room.spot._trainer.weights()
    renewed = DrafterWeights(version=2, tensors=dict(room.published.tensors))
    room.spot.begin(renewed)
    assert room.spot.base_version == 2
    assert same(room.spot._trainer.weights(), trained)
    other = {name: 2 * tensor for name, tensor in renewed.tensors.items()}
    room.spot.begin(DrafterWeights(version=3, tensors=other))
    assert same(room.spot._trainer.weights(), other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_replicas_merge_to_themselves(dtype: torch.dtype) -> None:
    values = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    merged = merge([_replica(values, tokens) for tokens in (3, 7, 1)])
    assert merged["fc.weight"].dtype == dtype
    assert torch.equal(merged["fc.weight"], values)


def test_broken_and_outdated_replicas_are_left_out() -> None:
    broken = [_replica(float(value), 500, version=2) for value in ("nan", "inf")]
    sound = [_replica(1.0, 10, version=2), _replica(2.0, 10, version=2)]
    merged = merge([broken[0], sound[0], _replica(77.0, 999, version=1), sound[1], broken[1]])
    assert torch.equal(merged["fc.weight"], torch.full((2, 3), 1.5))
    with pytest.raises(AssertionError, match="no replica is left"):
        merge(broken)


def test_replicas_are_weighted_by_their_trained_tokens() -> None:
    merged = merge([_replica(1.0, 300), _replica(5.0, 100), _replica(9.0, 0)])
    assert torch.equal(merged["fc.weight"], torch.full((2, 3), 2.0))
