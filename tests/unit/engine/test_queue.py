"""The observation queue: steps are merged in order, dropped when old, and keep their features."""

from collections.abc import Sequence

import torch

from longtail.engine.batch import Scheduled
from longtail.engine.request import ActiveRequest
from longtail.engine.speculation.queue import Computed, ObservationBatch, ObservationQueue
from longtail.speculation.tree import Accepted, DraftTree
from longtail.types import Request
from support.worked import TREE, TREE_ACCEPTED


def request(name: str, num_tokens: int, num_computed: int = 0) -> ActiveRequest:
    made = Request(request_id=name, prompt_tokens=(0, 1, 2), noise_key=1)
    return ActiveRequest(
        request=made,
        tokens=list(range(num_tokens)),
        policy_version=0,
        num_computed=num_computed,
    )


def label(active: ActiveRequest, position: int) -> float:
    """The feature of a token says whose it is, and where."""
    return 1000.0 * ord(active.request_id) + position


def step(*parts: tuple[ActiveRequest, int, int], tapped: bool = True) -> Computed:
    """A step of (request, first position, number of tokens)."""
    labels = [[label(active, first + i)] for active, first, count in parts for i in range(count)]
    return Computed(
        [Scheduled(active=active, num_tokens=count) for active, _, count in parts],
        [first + count for _, first, count in parts],
        {},
        torch.tensor(labels) if tapped else None,
    )


def told(news: ObservationBatch) -> list[tuple[str, int, int]]:
    return [(seen.request_id, seen.start, seen.num_tokens) for seen in news.seen]


def assert_features_belong(news: ObservationBatch, actives: Sequence[ActiveRequest]) -> None:
    """Rows are the tokens of `seen`, one after the other."""
    by_name = {active.request_id: active for active in actives}
    expected = [
        label(by_name[seen.request_id], seen.start + i)
        for seen in news.seen
        for i in range(seen.num_tokens)
    ]
    assert news.features is not None
    assert news.features[:, 0].tolist() == expected


def test_steps_are_joined_request_by_request_in_order():
    a, b, queue = request("a", 9), request("b", 9), ObservationQueue()
    queue.add(step((a, 3, 1), (b, 5, 1)))
    queue.add(step((b, 6, 1), (a, 4, 1)))
    queue.add(step((a, 5, 1)))
    (news,) = queue.take(with_done=False)
    assert told(news) == [("a", 3, 3), ("b", 5, 2)]
    assert news.seen[0].tokens is a.tokens
    assert news.seen[0].prompt_len == 3
    assert_features_belong(news, [a, b])
    assert list(queue.take(with_done=False)) == []


def test_finished_requests_are_observed_only_on_request():
    for with_done, expected in ((True, [("a", 3, 2), ("b", 5, 2)]), (False, [("b", 5, 2)])):
        a, b, queue = request("a", 9), request("b", 9), ObservationQueue()
        queue.add(step((a, 3, 1), (b, 5, 1)))
        queue.add(step((a, 4, 1), (b, 6, 1)))
        a.is_done = True
        (news,) = queue.take(with_done=with_done)
        assert told(news) == expected
        assert news.done == (("a",) if with_done else ())
        assert_features_belong(news, [a, b])


def test_a_step_that_reads_a_prompt_is_the_last_of_its_record():
    a, b, queue = request("a", 9), request("b", 9), ObservationQueue()
    queue.add(step((a, 3, 1)))
    queue.add(step((a, 4, 1), (b, 0, 3)))
    queue.add(step((a, 5, 1), (b, 3, 1)))
    records = list(queue.take(with_done=False))
    assert [told(news) for news in records] == [
        [("a", 3, 2), ("b", 0, 3)],
        [("a", 5, 1), ("b", 3, 1)],
    ]
    for news in records:
        assert_features_belong(news, [a, b])


def verified(active: ActiveRequest, root: int, draft: DraftTree, found: Accepted) -> Computed:
    """A step that verified a draft; a node's feature is 0.5 and its number, a hundredth each."""
    labels = [[label(active, root)], *[[0.5 + 0.01 * node] for node in range(1, draft.size + 1)]]
    return Computed(
        [Scheduled(active=active, num_tokens=1, draft=draft)],
        [root + 1 + len(found.path)],
        {active.request_id: found},
        torch.tensor(labels),
    )


def test_only_the_accepted_path_of_a_draft_is_observed():
    a, queue = request("a", 12), ObservationQueue()
    queue.add(verified(a, 5, TREE, TREE_ACCEPTED))
    queue.add(step((a, 8, 1)))
    (news,) = queue.take(with_done=False)
    assert told(news) == [("a", 5, 4)]
    assert news.features is not None
    expected = torch.tensor([label(a, 5), 0.51, 0.53, label(a, 8)])
    assert torch.equal(news.features[:, 0], expected)


def test_steps_beyond_the_lookback_fall_off_the_end():
    a, queue = request("a", 50), ObservationQueue(lookback=4)
    for position in range(3, 20):
        queue.add(step((a, position, 1)))
    (news,) = queue.take(with_done=False)
    assert told(news) == [("a", 16, 4)]
    assert_features_belong(news, [a])


def test_features_that_wait_are_bounded_but_the_last_step_stays():
    a, queue = request("a", 50), ObservationQueue()
    large = torch.zeros(1, 10 * 2**20)  # 40 MiB
    for position in (3, 4, 5):
        queue.add(Computed([Scheduled(active=a, num_tokens=1)], [position + 1], {}, large))
    (news,) = queue.take(with_done=False)
    assert told(news) == [("a", 5, 1)]
