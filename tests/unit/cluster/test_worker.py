"""A worker: what it reports of its tasks, and what its drafter learns from."""

import pytest

from end_to_end.workshop import Workshop, save_untaught
from longtail.assembly.drafters import drafter_names
from longtail.assembly.plan import plan_run
from longtail.assembly.worker import build_components
from longtail.cluster.records import Progress
from longtail.cluster.workers.components import WorkerComponents
from longtail.cluster.workers.processes import Place
from longtail.cluster.workers.worker import Worker
from longtail.config.rl import load
from longtail.drafter.training.buffer import SequenceSnapshot
from longtail.drafter.training.replica_gain import SpotReport
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.model.hf.model import load_model
from longtail.speculation.strategy import Strategy
from longtail.types import Request
from support.drafters import ModelChains
from support.engine_requests import request_of
from support.rank_processes import Plan


def make_components(workshop: Workshop, *words: str) -> WorkerComponents:
    drafter = save_untaught(workshop.model, workshop.path / "drafter")
    config = load(None, workshop.words("run", f"--speculation.drafter={drafter}", *words)[1:])
    limits = EngineLimits(max_running=8, max_step_tokens=64, max_len=64)
    names = drafter_names(config.speculation.drafter, config.model.path, learns=True)
    return build_components(plan_run(config, workshop.model), names, limits, Place())


@pytest.fixture
def components(workshop: Workshop) -> WorkerComponents:
    return make_components(workshop, "--cluster.workers=2")


@pytest.fixture
def worker(components: WorkerComponents) -> Worker:
    return Worker(components)


@pytest.fixture
def asked() -> list[Request]:
    return [request_of(f"{n}", (5, 6, 7 + n), n, max_tokens=12) for n in range(4)]


def test_accepted_drafts_are_reported_in_characters_of_the_texts(workshop):
    """The target itself drafts, so all its drafts are accepted."""
    components = make_components(workshop, "--speculation.drafter=none")
    worker = Worker(components)
    worker.publish()
    drafter = ModelChains(load_model(workshop.model, components.generator.model.dtype))
    components.generator.speculate(Speculation.fixed(drafter, Strategy(depth=3)))
    result = worker.generate([request_of("a", (5, 6), 1, max_tokens=24)])
    assert result.series is not None
    assert sum(result.series.accepted) > 10
    places, (completion,) = result.drafted["a"], result.completions
    decode = components.tokenizer.decode
    # Every token of this tokenizer is one character or none, so tokens and characters agree.
    assert {len(decode([token])) for token in completion.tokens} <= {0, 1}
    drafted = sum(end - begin for begin, end in zip(places[::2], places[1::2], strict=True))
    assert len(completion.text) / 2 < drafted <= sum(result.series.accepted)
    assert list(places) == sorted(places)


def test_learning_shows_a_beat_for_every_micro_batch(components, worker):
    heard: list[Progress] = []
    components.policy.register_forward_pre_hook(lambda *_: heard.append(worker.progress()))
    (batch,) = Plan(seed=1).batches()
    worker.learn([batch])
    assert [progress.beats for progress in heard] == list(range(len(batch.micro_batches)))
    # After the last of them it waited for others, of which there are none, and is done.
    assert worker.progress() == Progress(beats=len(batch.micro_batches) + 1)


def test_texts_are_of_the_present_rollout_only(worker, asked):
    worker.publish()
    seen: list[int] = []
    worker.on_step = lambda progress: seen.append(len(worker.sequences(1)))
    worker.generate(asked)
    assert max(seen) == len(asked)
    assert worker.sequences(2) == []


def learn(components: WorkerComponents) -> SpotReport:
    """Learn the texts of the buffer for two updates."""
    drafting = components.drafting
    assert drafting is not None
    drafting.trainer.begin(drafting.served)
    last = drafting.trainer._trainer.steps + 2
    return drafting.trainer.train(drafting.buffer, lambda: drafting.trainer._trainer.steps == last)


@pytest.mark.slow
def test_a_worker_trains_on_its_own_texts_with_the_features_it_kept(components, asked):
    worker = Worker(components)
    worker.publish()
    requests = {each.request_id: each for each in asked}
    done = worker.generate(asked).completions  # in the order of their ends
    components.drafting.buffer.add(SequenceSnapshot.of(requests[d.request_id], d, 1) for d in done)
    report = learn(components)
    assert report.num_reused == report.num_tokens > 0
    worker.publish()  # the same texts, of a policy that is gone
    report = learn(components)
    assert report.num_tokens > report.num_reused == 0


def test_features_are_not_kept_without_memory_for_them(workshop):
    components = make_components(workshop, "--cluster.workers=2", "--spot.features_mb=0")
    assert components.generator.speculation is not None
    assert components.generator.speculation.features is None
