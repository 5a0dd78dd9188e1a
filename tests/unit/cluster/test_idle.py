"""Learning ahead and requests that move, in simulated time: what is learned and written is whole.

Workers write a token of each of n running requests in 10 + n milliseconds; a group's micro-batch
has as many tokens as its texts.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longtail.cluster.group import WorkerGroup
from longtail.cluster.workers.states import State
from longtail.rl.group_stream import GroupStream
from longtail.types import Completion, Request
from support.fake_worker import Death, text
from support.scripted_pool import ScriptedPool, batch, begun, requests


class Stream(GroupStream):
    """Groups of requests, each with a micro-batch once all its texts are finished."""

    def __init__(self, asked: list[Request]) -> None:
        self._missing: dict[str, set[str]] = {}
        for each in asked:
            self._missing.setdefault(each.group_id, set()).add(each.request_id)
        self._tokens = dict.fromkeys(self._missing, 0)
        self._new: list[Any] = []
        self.received: list[str] = []

    def add(self, completions: Iterable[Completion]) -> None:
        for each in completions:
            self.received.append(each.request_id)
            group = each.request_id.rpartition("#")[0]
            self._missing[group].remove(each.request_id)
            self._tokens[group] += len(each.tokens)
            if not self._missing[group]:
                packed = SimpleNamespace(num_tokens=self._tokens[group])
                self._new.append(SimpleNamespace(name=group, packed=packed))

    def micro_batches(self) -> list[Any]:
        found, self._new = self._new, []
        return found


def token_s(num_running: int) -> float:
    return 0.010 + 0.001 * num_running


def rolled(pool: ScriptedPool, asked: list[Request], **config: Any) -> tuple[WorkerGroup, Any]:
    group = begun(pool, "never", **config)
    group.learn([batch(1)])  # all are in one team
    stream: Any = Stream(asked)
    result = group.rollout(1, asked, stream)
    assert [each.tokens for each in result.completions] == [text(each) for each in asked]
    assert sorted(stream.received) == sorted(each.request_id for each in asked)
    return group, result


def held(pool: ScriptedPool) -> list[str]:
    """Return the micro-batches in the sums of the workers that live."""
    return sorted(name for worker in pool.workers for name in worker.held)


def groups(asked: list[Request]) -> list[str]:
    return sorted({each.group_id for each in asked})


TAIL = requests(20, 20, 20, 20, 30, 30, 30, 900, siblings=2)
"""Four groups, the last of which is long."""


def test_idle_workers_learn_from_finished_groups_while_the_last_text_is_written():
    pool = ScriptedPool(2, has_drafter=False, token_s=token_s, accumulate_s=0.01)
    group, result = rolled(pool, TAIL)
    spans = group.drain_timeline().spans
    end_s = max(span.end_s for span in spans if span.state is State.GENERATING)
    ahead = [span for span in spans if span.state is State.AHEAD]
    assert held(pool) == groups(TAIL)[:3]
    assert all(span.end_s <= end_s for span in ahead)
    assert result.seconds == pytest.approx(9.9, rel=0.05)
    group.learn([batch(2)])
    assert held(pool) == groups(TAIL)


def test_a_refill_begins_with_idle_workers_and_both_rounds_are_learned_from_once():
    pool = ScriptedPool(2, has_drafter=False, token_s=token_s, accumulate_s=0.05)
    group, _ = rolled(pool, TAIL)
    more = requests(30, 30, 500, 20, siblings=2, first=10)
    stream: Any = Stream(more)
    assert len(group.rollout(1, more, stream).completions) == 4
    group.learn([batch(2)])
    assert held(pool) == sorted(groups(TAIL) + groups(more))


@settings(max_examples=30)
@example([52, 399, 173, 1], 4, [(0, 14.546), (0, 5.0)], 0.0)  # it ends while another one starts
@given(
    st.lists(st.integers(1, 400), min_size=4, max_size=24),
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(0, 1), st.floats(5.0, 20.0)), max_size=2),
    st.floats(0.0, 0.05),
)
def test_texts_are_whole_and_nothing_is_learned_from_twice(lengths, workers, deaths, more_s):
    asked = requests(*lengths, siblings=2)
    pool = ScriptedPool(
        workers,
        has_drafter=False,
        token_s=lambda n: 0.002 + more_s * n,
        accumulate_s=0.005,
        deaths=[Death(worker=worker, at_s=at_s) for worker, at_s in deaths],
    )
    group, _ = rolled(pool, asked)
    group.learn([batch(2)])
    assert len(held(pool)) == len(set(held(pool)))
    if not any(pool.births):
        assert held(pool) == groups(asked)
