"""Spot training in simulated time: texts to idle workers, drafters from them."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from longtail.cluster.group import WorkerGroup
from longtail.cluster.work.drafter_publisher import DrafterPublisher
from longtail.cluster.work.drafter_versions import DrafterVersions
from longtail.cluster.workers.worker_pool import WorkerPool
from longtail.drafter.ridge.sums import SequenceSums
from longtail.drafter.training.buffer import DrafterBuffer
from longtail.drafter.training.replica_gain import SpotEnd
from longtail.drafter.weights import DrafterWeights
from support.fake_worker import QUALITY, FakeWorker, SpotScript, text
from support.scripted_pool import ScriptedPool, batch, begun, requests
from support.tiny_models import tiny_model

TAIL = requests(100, 10, 50)


def step(group: WorkerGroup, number: int, asked=TAIL) -> list[tuple[str, int, str]]:
    """Run a step and return the decisions about the drafter."""
    rolled = group.rollout(number, asked)
    group.train_drafter()
    assert [each.tokens for each in rolled.completions] == [text(each) for each in asked]
    group.learn([batch(number)])
    group.publish()
    group.offer_drafter()
    return [(each.what, each.version, each.reason) for each in group.drain_decisions()]


def lengths_received(worker: FakeWorker) -> dict[str, list[int]]:
    """Return the lengths of all received versions of each text."""
    found: dict[str, list[int]] = {}
    for each in worker.received:
        found.setdefault(each.request_id, []).append(len(each.tokens) - each.prompt_len)
    return found


def test_spot_workers_receive_each_text_once_and_longer_versions_of_unfinished_ones():
    pool = ScriptedPool(3)
    begun(pool).rollout(1, TAIL)
    received = lengths_received(pool.workers[1])
    assert received["p1@0#0"] == [10], "finished before it began to train"
    for name, whole in (("p0@0#0", 100), ("p2@0#0", 50)):
        assert received[name] == sorted(set(received[name])), "longer each time"
        assert len(received[name]) >= whole / 10 - 3
    assert received["p2@0#0"][-1] == 50


def test_a_restored_drafter_is_served_and_learns_on():
    pool = ScriptedPool(2)
    group = begun(pool)
    step(group, 1)
    state = group.drafter_state()
    again = ScriptedPool(2)
    resumed = begun(again)
    resumed.restore_drafter(state)
    assert resumed.drafter.versions.published.version == state.numbers["version"]
    assert all(each.served.version == state.numbers["version"] for each in again.workers)
    resumed.rollout(2, requests(50, 10, first=5))
    assert {each.step for each in again.workers[1].received} == {2}
    step(resumed, 3)
    assert resumed.drafter.versions.published.version > state.numbers["version"]


def test_a_replaced_worker_adopts_the_published_drafter_before_it_generates():
    pool = ScriptedPool(2)
    group = begun(pool)
    step(group, 1)
    pool.kill(1)
    group.publish()
    version = group.drafter.versions.published.version
    assert [each.served.version for each in pool.workers] == [version, version] != [0, 0]


def test_a_drafter_that_is_not_finite_is_discarded_and_the_run_continues():
    bad = SpotScript(ends_s=3.0, reason=SpotEnd.NOT_FINITE)
    pool = ScriptedPool(3, spot_scripts=lambda worker, nth: bad if worker == 1 else SpotScript())
    group = begun(pool)
    assert ("discarded", 0, "it is not finite") in step(group, 1)
    assert any("worker 1: its drafter is discarded" in said for said in pool.log_lines)
    assert [worker for _, worker in pool.starts("train_drafter")].count(1) == 1, "it trains no more"
    assert group.drafter.versions.published.tensors["w"].isfinite().all()


def test_training_that_fails_is_recorded_and_the_run_continues():
    failing = SpotScript(ends_s=1.0, error=RuntimeError("out of memory"))
    pool = ScriptedPool(2, spot_scripts=lambda worker, nth: failing)
    decisions = step(begun(pool), 1)
    assert decisions == [("discarded", 0, "RuntimeError: out of memory")]
    assert "out of memory" in pool.log_lines[0]
    assert pool.births == [0, 0]


def test_the_only_worker_trains_after_the_rollout_for_a_tenth_of_its_time():
    pool = ScriptedPool(1)
    group = begun(pool)
    before = pool.clock.now
    decisions = step(group, 1, requests(400, 10))
    ((when, _),) = pool.starts("train_drafter")
    assert when == pytest.approx(before + 40.0)
    assert lengths_received(pool.workers[0]) == {"p0@0#0": [400], "p1@0#0": [10]}
    assert [what for what, _, _ in decisions] == ["trained", "offered", "published"]
    # Two measurements in four seconds.
    assert pool.workers[0].served.tensors["w"].item() == pytest.approx(QUALITY * 1.05**2)
    group.train_drafter()
    assert len(pool.starts("train_drafter")) == 1, "a rollout is learned once"


def test_a_worker_that_found_no_text_begins_when_there_are_new_ones():
    scripts = iter([SpotScript(ends_s=0.2, reason=SpotEnd.NO_SEQUENCES)])
    pool = ScriptedPool(2, spot_scripts=lambda worker, nth: next(scripts, SpotScript()))
    begun(pool).rollout(1, requests(60, 10))
    (first, _), (again, _) = pool.starts("train_drafter")
    assert first < again < first + 2.0


def test_sums_without_a_solution_keep_the_weights_and_are_reported_once():
    said, sums = [], SequenceSums(tiny_model(), 2).take()
    sums.products[0].fill_diagonal_(-1e12)
    sums.counts.add_(9.0)
    weights = DrafterWeights(version=3, tensors={"w": torch.ones(1)})
    versions = DrafterVersions(weights, DrafterBuffer(1000, seed=0), sums)
    worker = SimpleNamespace(_components=SimpleNamespace(tokenizer=SimpleNamespace(eos_ids=())))
    pool = Mock(spec=WorkerPool, present=(0, 1), size=2)
    pool.now.return_value = 0.0
    pool.run_each = lambda task, args: [task(worker, *each) for each in args.values()]
    publisher = DrafterPublisher(pool, versions, said.append)
    for _ in range(2):
        publisher._new_sums = [sums]
        publisher.offer()
    assert versions.published is weights
    assert [line[:34] for line in said] == ["the drafter keeps its weights: no "]
