"""Training of an EAGLE drafter in a trainer's job: by one process, and by two that exchange."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Barrier, Lock, Thread
from typing import Any

import pytest
from torch import Tensor

from longtail.cluster.workers.components import Drafting
from longtail.drafter.training.gain import DrafterGain
from longtail.drafter.weights import weighted_mean
from longtail.integrations.mirror import MirroredPolicy
from longtail.integrations.trl.host import Ranks
from longtail.integrations.trl.training import DrafterTraining
from longtail.types import Completion, FinishReason, Request
from support.spot_training import SpotSetup, counting, same


@dataclass
class Job:
    """Processes as threads of one."""

    size: int
    sums: dict[str, float] = field(default_factory=dict)
    rows: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier, self.lock = Barrier(self.size, timeout=60.0), Lock()


class ThreadRanks(Ranks):  # type: ignore[misc] # final, and checked by type
    """Collectives between threads, as those of `Ranks` between processes."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self.rank, self.size = job, rank, job.size
        self.has_trained = False

    def add(self, name: str, number: float) -> None:
        with self._job.lock:
            self._job.sums[name] = self._job.sums.get(name, 0.0) + number

    def total(self, name: str) -> float:
        """Return a sum; before it has trained, a process sees the others at work."""
        return self._job.sums.get(name, 0.0) if self.has_trained else 0.0

    def _exchange(self, own: Any) -> list[Any]:
        self._job.rows[self.rank] = own
        self._job.barrier.wait()
        found = [self._job.rows[rank] for rank in range(self.size)]
        self._job.barrier.wait()
        return found

    def all_gather(self, row: Sequence[float]) -> list[list[float]]:
        return [list(each) for each in self._exchange(row)]

    def broadcast(self, tensors: Mapping[str, Tensor], source: int) -> dict[str, Tensor]:
        return {name: each.clone() for name, each in self._exchange(tensors)[source].items()}


class Policy(MirroredPolicy):  # type: ignore[misc]
    def __init__(self) -> None:
        self.drafter: Mapping[str, Tensor] = {}

    def load_drafter(self, tensors: Mapping[str, Tensor]) -> None:
        self.drafter = tensors


class Rank:
    """A process with a drafter that it trains for a number of measurements in each rollout."""

    def __init__(self, job: Job, number: int, *, measurements: int) -> None:
        self.room, self.policy = SpotSetup(), Policy()
        self.ranks, self._number = ThreadRanks(job, number), number
        drafting = Drafting(
            served=self.room.published, buffer=self.room.buffer, trainer=self.room.spot
        )
        train = self.room.spot.train

        def briefly(buffer: Any, stopped: Any, _: Any) -> Any:
            seen = list[Any]()
            report = train(buffer, lambda: len(seen) == measurements, seen.append)
            self.ranks.has_trained = True
            return report

        self.room.spot.train = briefly  # type: ignore[method-assign]
        self.training = DrafterTraining(drafting, self.ranks, self.policy, ())

    def rollout(self, *, waits: bool) -> None:
        self.training.begin()
        self.ranks.has_trained = False
        asked, done = [], []
        for number in range(30):
            text = counting(100 * self._number + number, 9 + number % 20)
            asked.append(
                Request(request_id=text.request_id, prompt_tokens=text.tokens[:3], noise_key=1)
            )
            done.append(
                Completion(
                    request_id=text.request_id,
                    tokens=text.tokens[3:],
                    logprobs=(),
                    text="",
                    finish_reason=FinishReason.STOP,
                    policy_version=0,
                )
            )
        self.training.add(asked, done)
        self.training.train(10.0, waits=waits)


def together(*acts: Callable[[], None]) -> None:
    threads = [Thread(target=act) for act in acts]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60.0)
        assert not each.is_alive()


@pytest.mark.slow
def test_processes_draft_with_the_mean_of_what_they_trained() -> None:
    job = Job(2)
    ranks = [Rank(job, number, measurements=1 + number) for number in range(2)]
    together(*(lambda each=each: each.rollout(waits=True) for each in ranks))
    assert [each.training.publisher.published.version for each in ranks] == [1, 1], (
        "not yet exchanged"
    )
    replicas = [each.training._replica for each in ranks]
    assert job.sums["trained_tokens"] >= sum(each.num_tokens for each in replicas if each) > 0
    together(*(lambda each=each: each.training.begin() for each in ranks))
    found = [each.training.publisher.published for each in ranks]
    assert [each.version for each in found] == [2, 2]
    assert [same(dict(each.policy.drafter), dict(found[0].tensors)) for each in ranks] == [True] * 2
    counts = [each.num_tokens for each in replicas if each]
    assert same(
        dict(found[0].tensors), weighted_mean([each.weights for each in replicas if each], counts)
    )
    assert found[0].num_tokens == found[1].num_tokens == sum(counts)
    assert ranks[0].training.publisher.accept_len == ranks[1].training.publisher.accept_len
    assert all(each.room.spot._base.version == 1 for each in ranks)
    together(*(lambda each=each: each.rollout(waits=True) for each in ranks))
    assert all(each.room.spot._base.version == 2 for each in ranks)
    state = ranks[0].training.state()
    again = Rank(Job(1), 0, measurements=1)
    again.training.restore(state)
    assert again.training.publisher.published.version == 2
    assert same(dict(again.policy.drafter), dict(found[0].tensors))


@pytest.mark.slow
def test_a_process_alone_trains_unless_it_costs_more_than_it_brings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = Rank(Job(1), 0, measurements=2)
    alone.rollout(waits=False)
    assert alone.training.publisher.published.version == 2, "published at once"
    assert alone.training.publisher.accept_len is not None
    monkeypatch.setattr(DrafterGain, "share_s", lambda *_: 0.0)
    before = alone.room.tensors()
    alone.rollout(waits=False)
    assert same(alone.room.tensors(), before)
