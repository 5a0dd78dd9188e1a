"""The scheduler's choices, one scenario each, over a cache of four-token blocks."""

import torch

from longtail.engine.batch import Scheduled
from longtail.engine.kv_cache import KVCache
from longtail.engine.request import ActiveRequest
from longtail.engine.scheduler import Scheduler
from longtail.types import Request
from support.fakes import LedgerKV
from support.tiny_models import tiny_config

Chosen = list[tuple[str, int]]


def make_scheduler(
    *, num_tokens: int = 400, max_running: int = 4, max_step_tokens: int = 16
) -> Scheduler:
    kv = KVCache(
        tiny_config(),
        num_tokens=num_tokens,
        max_rows=max_running + 2,  # more rows than places: the limit is the scheduler's
        max_len=num_tokens,
        dtype=torch.float32,
        block_size=4,
    )
    return Scheduler(LedgerKV(kv), max_running=max_running, max_step_tokens=max_step_tokens)


def active(
    name: str, prompt_len: int, group: str = "", first: int = 0, template_len: int = 0
) -> ActiveRequest:
    prompt = (*range(template_len), *range(first, first + prompt_len))
    request = Request(request_id=name, prompt_tokens=prompt, noise_key=0, group_id=group)
    return ActiveRequest(request=request, tokens=list(prompt), policy_version=0)


def names(chosen: list[Scheduled]) -> Chosen:
    return [(each.active.request_id, each.num_tokens) for each in chosen]


def step(scheduler: Scheduler) -> Chosen:
    """Schedule, compute, and draw a token for each request that draws; none finishes."""
    chosen = scheduler.schedule()
    result = names(chosen)
    kv = scheduler._kv
    assert isinstance(kv, LedgerKV)
    for each in chosen:
        one, draws = each.active, each.draws
        start = one.num_computed
        kv.write(one.request_id, one.tokens[start : start + each.num_tokens])
        one.num_computed += each.num_tokens
        if draws:
            one.tokens.append(1000)
    return result


def test_the_youngest_request_is_preempted_and_recomputed():
    """Four blocks: a needs its third, so c goes; c comes back, tokens kept, when a has left."""
    scheduler = make_scheduler(num_tokens=16, max_running=3)
    a, b, c = active("a", 8), active("b", 3), active("c", 3)
    for each in (a, b, c):
        scheduler.add(each)
    assert step(scheduler) == [("a", 8), ("b", 3), ("c", 3)]
    assert step(scheduler) == [("a", 1), ("b", 1)]
    assert scheduler.num_preemptions == 1
    assert [each.request_id for each in scheduler.waiting] == ["c"]
    assert (c.num_computed, c.tokens) == (0, [0, 1, 2, 1000])
    scheduler.finish(a)
    assert step(scheduler) == [("b", 1), ("c", 4)]


def test_siblings_wait_for_their_prompt_while_others_pass():
    scheduler = make_scheduler(max_running=6, max_step_tokens=8)
    for each in (
        active("a0", 10, "g"),
        active("a1", 10, "g"),
        active("b", 2),
        active("a2", 10, "g"),
    ):
        scheduler.add(each)
    assert step(scheduler) == [("a0", 8)]
    assert step(scheduler) == [("a0", 2), ("b", 2)]
    # Nine of ten prompt tokens are taken over; the last is computed, to draw from.
    assert step(scheduler) == [("a0", 1), ("b", 1), ("a1", 1), ("a2", 1)]
    assert scheduler.num_shared_tokens == 18
    assert scheduler.num_preemptions == 0


def test_a_waiting_sibling_inherits_the_kv_of_a_finished_one():
    scheduler = make_scheduler(max_running=1)
    a, b = active("a", 5, "g"), active("b", 5, "g")
    for each in (a, active("other", 2), b):
        scheduler.add(each)
    assert step(scheduler) == [("a", 5)]
    scheduler.finish(a)
    assert list(scheduler.running) == ["b"]
    assert step(scheduler) == [("b", 1)]
    assert scheduler.num_shared_tokens == 4


def test_a_group_with_different_prompts_shares_no_kv():
    """Two prompts under one group id used to read each other's KV, silently."""
    scheduler = make_scheduler()
    scheduler.add(active("a", 4, "g"))
    scheduler.add(active("b", 4, "g", first=50))
    assert step(scheduler) == [("a", 4), ("b", 4)]
    assert scheduler.num_shared_tokens == 0


def test_prompts_that_begin_alike_compute_the_beginning_once():
    """Also tokens beyond the last whole block; the first has computed them before others start."""
    scheduler = make_scheduler(max_step_tokens=40)
    for name, first in (("a", 500), ("b", 600), ("apart", 900), ("c", 700), ("b2", 600)):
        template_len = 0 if name == "apart" else 21
        scheduler.add(active(name, 3, f"group {first}", first, template_len))
    assert step(scheduler) == [("a", 24), ("apart", 3)]
    assert step(scheduler) == [("a", 1), ("apart", 1), ("b", 3), ("c", 3)]
    assert scheduler.num_shared_tokens == 2 * 21
    scheduler.finish(scheduler.running["apart"])
    assert step(scheduler) == [("a", 1), ("b", 1), ("c", 1), ("b2", 1)]
    assert scheduler.num_shared_tokens == 2 * 21 + 23
