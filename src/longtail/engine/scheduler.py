"""The scheduler: it chooses the requests of the next step, and their numbers of tokens.

    add ---> waiting ---admit---> running ---finish---> gone
                ^                    |  |
                +-----preempt--------+  +--> a waiting sibling takes over its KV

The order of a step is: running requests with one pending token (decode), running requests with a
part of their prompt pending, then admissions, oldest first, all within a token budget. When KV runs
short, requests that ended and may go on lose theirs, the oldest first; then the youngest running
request is preempted: it loses its KV, keeps its tokens, moves to the front of the queue and is
recomputed. Requests whose prompts begin alike share that KV: the first computes it, the others wait
for it and start with it.
"""

from collections import deque
from typing import final

from longtail.engine.batch import Scheduled
from longtail.engine.kv_cache import KVCache
from longtail.engine.request import ActiveRequest


@final
class PrefixIndex:
    """The running requests by the beginnings of their prompts, for sharing KV.

    Prompts of one task begin alike: a chat template, a system prompt, examples. The KV of a
    beginning depends on its tokens alone, so one request computes it and the others start with it.

        prompt  [ 16 tokens ][ 16 tokens ][ 9 ]      hashed: 16 and 32 tokens, and all 41 with the
                                                     group, which may share a shorter prompt, too

    A beginning is found by its longest hash, then compared token by token, and beyond that hash.
    """

    def __init__(self) -> None:
        self._users: dict[int, dict[ActiveRequest, None]] = {}
        """Requests by hash of a beginning, the oldest first."""

    def add(self, active: ActiveRequest) -> None:
        """Add a request that starts to run."""
        for _, key in active.beginnings:
            self._users.setdefault(key, {})[active] = None

    def remove(self, active: ActiveRequest) -> None:
        """Remove a request that no longer runs."""
        for _, key in active.beginnings:
            users = self._users[key]
            del users[active]
            if not users:
                del self._users[key]

    def longest(self, active: ActiveRequest) -> tuple[int, ActiveRequest | None]:
        """Return the longest shared beginning in tokens, and the oldest running request with it.

        That request may not have computed it yet. The last token of one is never shared: it is
        computed, to draw the next one.
        """
        most = len(active.tokens) - 1
        for size, key in reversed(active.beginnings):
            num_tokens = min(size, most)
            own = active.tokens[:num_tokens]
            for user in self._users.get(key, ()) if num_tokens else ():
                if user.tokens[:num_tokens] == own:
                    return _extended(num_tokens, active, user), user
        return 0, None


def _extended(num_tokens: int, active: ActiveRequest, user: ActiveRequest) -> int:
    """Return the number of equal tokens at the beginning, of which `num_tokens` are known."""
    own = active.tokens[num_tokens : min(active.prompt_len, len(active.tokens) - 1)]
    for token, other in zip(own, user.request.prompt_tokens[num_tokens:], strict=False):
        if token != other:
            break
        num_tokens += 1
    return num_tokens


class Scheduler:
    """Holds every unfinished request, in exactly one of `waiting` and `running`.

    Invariants: a waiting request owns no KV; a running request owns KV for its computed tokens; the
    oldest running request is never preempted, so the engine always makes progress. Beside them
    `_kept` has ended requests, whose KV is given up before a running one waits for memory.
    """

    def __init__(self, kv: KVCache, *, max_running: int, max_step_tokens: int) -> None:
        assert max_step_tokens >= max_running, "every running request must get a token"
        self._kv = kv
        self._max_running, self._max_step_tokens = max_running, max_step_tokens
        self.waiting: deque[ActiveRequest] = deque()
        self.running: dict[str, ActiveRequest] = {}
        """By request_id, oldest admission first."""
        self._kept: dict[str, ActiveRequest] = {}
        """Ended requests that may go on, with their KV, the oldest first."""
        self._prefixes = PrefixIndex()
        self.num_preemptions = 0
        self.num_shared_tokens = 0
        """Prompt tokens whose KV came from another request instead of a forward pass."""

    def add(self, active: ActiveRequest) -> None:
        """Queue a request last."""
        if active.request_id in self._kept:  # its episode was given up, and is written again
            self._drop(active.request_id)
        self.waiting.append(active)

    def schedule(self) -> list[Scheduled]:
        """Choose the requests of a step; empty only if none is unfinished."""
        preemptions = self.num_preemptions
        chosen: list[Scheduled] = []
        budget = self._max_step_tokens
        decoding_first = sorted(self.running.values(), key=lambda active: active.num_pending > 1)
        for active in decoding_first:
            num_tokens = min(active.num_pending, budget)
            runs = active.request_id in self.running  # not preempted for an earlier request
            if num_tokens and runs and self._reserve_preempting(active, num_tokens):
                chosen.append(Scheduled(active=active, num_tokens=num_tokens))
                budget -= num_tokens
        if self.num_preemptions == preemptions:
            self._admit(chosen, budget)
        # A chosen request may have been preempted for a later one.
        return [each for each in chosen if each.active.request_id in self.running]

    def finish(self, active: ActiveRequest) -> None:
        """Remove a running request; a waiting sibling takes over the KV of its prompt."""
        if active.request.may_go_on and active.is_finished:
            self._kept[active.request_id] = self.running.pop(active.request_id)
            return
        self._stop(active)
        sibling = next((each for each in self.waiting if _are_siblings(each, active)), None)
        shared = 0 if sibling is None else min(sibling.prompt_len, len(sibling.tokens) - 1)
        if sibling is None or not 0 < shared <= active.num_computed:
            self._kv.release(active.request_id)
            return
        self.waiting.remove(sibling)
        self._kv.hand_over(active.request_id, sibling.request_id, shared)
        self._start(sibling, shared)

    def withdraw(self, active: ActiveRequest) -> None:
        """Remove a waiting or running request."""
        if active.request_id in self.running:
            self.finish(active)
        else:
            self.waiting.remove(active)

    def forget(self) -> None:
        """Give up the KV of all ended requests, as the weights change."""
        while self._give_up():
            pass

    def _give_up(self) -> bool:
        """Give up the KV of the request that ended first; False if there is none."""
        for name in self._kept:
            self._drop(name)
            return True
        return False

    def _drop(self, name: str) -> None:
        self._prefixes.remove(self._kept.pop(name))
        self._kv.release(name)

    def _reserve_preempting(self, active: ActiveRequest, num_tokens: int) -> bool:
        """Reserve KV, preempting the youngest requests; False if `active` itself was preempted."""
        while not self._kv.try_grow(active.request_id, active.num_computed + num_tokens):
            if self._give_up():
                continue
            youngest = next(reversed(self.running.values()))
            self._preempt(youngest)
            if youngest is active:
                return False
        return True

    def _preempt(self, active: ActiveRequest) -> None:
        assert len(self.running) > 1, "one request must fit in an empty cache"
        self._stop(active)
        self._kv.release(active.request_id)
        active.num_computed = 0
        self.waiting.appendleft(active)
        self.num_preemptions += 1

    def _admit(self, chosen: list[Scheduled], budget: int) -> None:
        """Start waiting requests in order while KV is free; some wait for KV to share."""
        skipped: list[ActiveRequest] = []
        while self.waiting and budget > 0 and len(self.running) < self._max_running:
            active = self.waiting.popleft()
            shared, source = self._beginning(active)
            if source is not None and source.num_computed < shared:
                skipped.append(active)
                continue
            num_tokens = min(len(active.tokens) - shared, budget)
            if not self._reserve(active, source, shared, shared + num_tokens):
                self.waiting.appendleft(active)
                if self._give_up():
                    continue
                break
            self._start(active, shared)
            chosen.append(Scheduled(active=active, num_tokens=num_tokens))
            budget -= num_tokens
        self.waiting.extendleft(reversed(skipped))

    def _beginning(self, active: ActiveRequest) -> tuple[int, ActiveRequest | None]:
        """Return the number of tokens whose KV another request has, and that request."""
        earlier = self._kept.get(active.request.continues)
        if earlier is None:
            return self._prefixes.longest(active)
        computed = min(earlier.num_computed, len(earlier.tokens))  # not what followed its end
        return min(computed, len(active.tokens) - 1), earlier

    def _reserve(
        self, active: ActiveRequest, source: ActiveRequest | None, num_shared: int, num_tokens: int
    ) -> bool:
        """Reserve KV for a new request, sharing what another one has computed."""
        if source is None:
            return self._kv.try_grow(active.request_id, num_tokens)
        if source.request_id == active.request.continues:
            if not self._kv.try_grow(source.request_id, num_tokens):
                return False
            self._prefixes.remove(self._kept.pop(source.request_id))
            self._kv.hand_over(source.request_id, active.request_id, num_tokens)
            return True
        return self._kv.try_share(
            source.request_id, active.request_id, num_shared=num_shared, num_tokens=num_tokens
        )

    def _start(self, active: ActiveRequest, num_shared: int) -> None:
        active.num_computed = num_shared
        self.num_shared_tokens += num_shared
        self.running[active.request_id] = active
        self._prefixes.add(active)

    def _stop(self, active: ActiveRequest) -> None:
        del self.running[active.request_id]
        self._prefixes.remove(active)


def _are_siblings(one: ActiveRequest, other: ActiveRequest) -> bool:
    """Return whether two requests have one group and prompt."""
    a, b = one.request, other.request
    return bool(a.group_id) and a.group_id == b.group_id and a.prompt_tokens == b.prompt_tokens
