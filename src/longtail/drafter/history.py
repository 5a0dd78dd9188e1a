"""Drafters without weights: suffix lookup in earlier texts.

The last tokens of a request are looked up in a pool of texts; the longest known context decides.

    HistoryDrafter   a pool for each prompt: the prompt, the request's own text, those of its group,
                     running or finished, and those of earlier epochs
    PhraseDrafter    one pool for all completions of the run, the newest first

    earlier texts      a b c d,  a b c d,  x b c e
    the request        .. a b c                            c is the root
    known contexts     a b c: d twice      b c and c: d twice, e once
    draft              d

A child is wrong if another known continuation comes, or an unknown one. Counts and noise predict
the first, the length of the context the second. A margin is the smaller of the two leads.

Pools survive updates of the policy. Each drafter has a confidence curve of its own, since the same
margin means more in texts of the same prompt than in those of others.
"""

import abc
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from heapq import heappop, heappush
from math import log
from typing import final

from jaxtyping import Float
from torch import Tensor

from longtail.speculation.confidence import EDGES
from longtail.speculation.drafter import NO_TAPS, Draftable, Drafter, Noise, Observed, Taps
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import DraftTree

_LENGTHS = (1, 2, 3, 4, 6, 8)
"""Context lengths, in tokens. A child's longest known one is at most one entry longer."""
_ALWAYS_KEPT = 4
"""Length from which a longer context is kept only if the next shorter one is known."""
_MIN_REACH = 0.02
"""Least probability of a drafted node; less likely ones cost more to verify than they gain."""
_SHIFT = 24
"""A single continuation is one integer: the token, with its count above these bits."""
_TOKEN = (1 << _SHIFT) - 1

Continuations = int | dict[int, int]
"""Continuations of a context: a single token with its count, or counts by token."""


@final
@dataclass(slots=True)
class _Pool:
    """Continuations of the contexts in some texts.

    Texts are strings with a character for each token, since strings are sliced and hashed fastest.
    Contexts are stored by their hash; a collision can spoil a draft, never a token.
    """

    after: dict[int, Continuations] = field(default_factory=dict)
    num_tokens: int = 0
    older: dict[int, Continuations] = field(default_factory=dict)
    """Continuations that were counted before `age`; read where `after` knows none."""
    running: dict[str, int] = field(default_factory=dict)
    """Number of counted tokens of each request in progress."""

    def age(self) -> None:
        """Forget what was counted before the last call."""
        self.older, self.after, self.num_tokens = self.after, {}, 0

    def count(self, text: str, first: int) -> None:
        """Count each character from `first` on as a continuation of those before it."""
        after = self.after
        self.num_tokens += len(text) - first
        for place in range(first, len(text)):
            token = ord(text[place])
            for length in _LENGTHS:
                if length > place:
                    break
                context = hash(text[place - length : place])
                known = after.get(context)
                if known is None:
                    after[context] = (1 << _SHIFT) | token
                    if length >= _ALWAYS_KEPT:
                        break
                elif isinstance(known, dict):
                    known[token] = known.get(token, 0) + 1
                elif known & _TOKEN == token:
                    after[context] = known + (1 << _SHIFT)
                else:
                    after[context] = {known & _TOKEN: known >> _SHIFT, token: 1}


@final
@dataclass(slots=True)
class _Root:
    """Root of one request's draft: its last tokens, its pool, and its noise, if any."""

    text: str
    pool: _Pool
    noise: Callable[[int], Callable[[int], float]] | None
    """Returns g of a depth, a function of the token."""

    def children(self, text: str, longest: int, level: int) -> tuple[int, list[tuple[float, int]]]:
        """Rank the continuations of the longest known context, from entry `longest` down.

        Returns the entry from which the children's lookup starts, and (margin, token), best first.
        """
        after, older = self.pool.after, self.pool.older
        for entry in range(min(longest, len(_LENGTHS) - 1), -1, -1):
            context = hash(text[-_LENGTHS[entry] :])
            known = after.get(context)
            if known is None and older:
                known = older.get(context)
            if known is not None:
                length = min(_LENGTHS[entry], len(text))
                if isinstance(known, int):
                    return entry + 1, [(log((known >> _SHIFT) * length * length), known & _TOKEN)]
                return entry + 1, self.ranked(known, length, level)
        return 0, []

    def ranked(self, known: dict[int, int], length: int, level: int) -> list[tuple[float, int]]:
        """Return margin and token of each continuation of `length` tokens, best first.

        With q(v) proportional to the counts, scores are log q(v), plus g if coupled. `safe` is the
        lead over an unseen token: PPM's method C (Moffat 1990) takes the odds against one as count
        / distinct tokens; by measurement they grow with the context's length squared.
        """
        noise = (lambda token: 0.0) if self.noise is None else self.noise(level)
        scored = [(log(count) + noise(token), token) for token, count in known.items()]
        scored.sort(reverse=True)
        safe = log(sum(known.values()) * length * length / len(known))
        (best, first), (second, _) = scored[:2]
        behind = [(min(score - best, safe), token) for score, token in scored[1:]]
        return [(min(best - second, safe), first), *behind]


class SuffixDrafter(Drafter):
    """Proposes earlier continuations; among several, the one that the noise selects.

    A token of a pool takes 200 (similar texts) to 500 bytes.
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._running: dict[str, _Pool] = {}
        self.num_tokens = 0
        """Number of tokens in all pools, prompts included."""

    @abc.abstractmethod
    def _find(self, tokens: Sequence[int], prompt_len: int) -> _Pool:
        """Return the pool of a new request."""

    @abc.abstractmethod
    def _make_room(self) -> None:
        """Forget the oldest texts beyond `max_tokens`."""

    @property
    def taps(self) -> Taps:
        """No features."""
        return NO_TAPS

    def propose(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Draft along the longest known contexts; EMPTY where the last token is unknown."""
        trees = []
        for row, request in enumerate(requests):
            pool = self._pool(request.request_id, request.tokens, request.prompt_len)
            own = None
            if noise is not None and request.sampling.temperature > 0.0:
                own = cache(partial(noise.of, row))
            root = _Root(_text(request.tokens[-_LENGTHS[-1] :]), pool, own)
            depth = min(strategy.depth, strategy.num_nodes, request.max_depth)
            trees.append(self._tree(root, depth, strategy))
        return trees

    def _tree(self, root: _Root, depth: int, strategy: Strategy) -> DraftTree:
        """Add the most likely node first; expand the first `num_expanded` nodes of each level.

        A node is never more likely than its parent, so the result equals growing level by level and
        then pruning.
        """
        table, width, size = self.curve.table(), strategy.width, strategy.num_nodes
        beam, expand = strategy.num_expanded, strategy.thresholds.expand
        floor = max(strategy.thresholds.verify, _MIN_REACH)
        tokens: list[int] = []
        parents: list[int] = []
        margins: list[float] = []
        likely: list[float] = []
        # A heap by reach and margin, both negated, with the data of the node.
        waiting: list[tuple[float, float, int, int, str, int, int]] = []
        expanded = [0] * depth
        reach, text, longest, level = -1.0, root.text, len(_LENGTHS), 0
        while True:
            if level < depth and expanded[level] < beam and -reach >= expand:
                expanded[level] += 1
                level += 1
                longest, ranked = root.children(text, longest, level)
                for margin, token in ranked[:width]:
                    child = reach * table[bisect_right(EDGES, margin)]
                    if -child >= floor:
                        node = (child, -margin, token, len(tokens), text, longest, level)
                        heappush(waiting, node)
            if not waiting or len(tokens) == size:
                break
            reach, margin, token, parent, text, longest, level = heappop(waiting)
            text += chr(token)
            tokens.append(token)
            parents.append(parent)
            margins.append(-margin)
            likely.append(-reach)
        return DraftTree(
            tokens=tuple(tokens),
            parents=tuple(parents),
            margins=tuple(margins),
            reach=tuple(likely),
        )

    def observe(
        self, seen: Sequence[Observed], features: Float[Tensor, "tokens features"] | None
    ) -> None:
        """Count the tokens that are not counted yet; recomputed tokens already are."""
        for each in seen:
            pool = self._pool(each.request_id, each.tokens, each.prompt_len)
            first, end = pool.running[each.request_id], each.start + each.num_tokens
            if end > first:
                begin = max(first - _LENGTHS[-1], 0)
                pool.count(_text(each.tokens[begin:end]), first - begin)
                pool.running[each.request_id] = end
                self.num_tokens += end - first
        self._make_room()

    def forget(self, request_id: str) -> None:
        """Mark the request as no longer in progress; its text stays."""
        pool = self._running.pop(request_id, None)
        if pool is not None:
            del pool.running[request_id]
            self._make_room()

    def refresh(self) -> None:
        """Mark all requests as no longer in progress; their texts stay."""
        for request_id in list(self._running):
            self.forget(request_id)

    def _pool(self, request_id: str, tokens: Sequence[int], prompt_len: int) -> _Pool:
        """Return the request's pool."""
        pool = self._running.get(request_id)
        if pool is None:
            pool = self._running[request_id] = self._find(tokens, prompt_len)
            pool.running[request_id] = prompt_len
        return pool


@final
class HistoryDrafter(SuffixDrafter):
    """Continues as earlier texts of the same prompt do.

    Above `max_tokens` tokens in all pools, the least recently used prompts without a request in
    progress are forgotten.
    """

    def __init__(self, max_tokens: int = 1_000_000) -> None:
        super().__init__(max_tokens)
        self._pools: dict[tuple[int, ...], _Pool] = {}
        """Pools by prompt tokens, the most recently used last."""

    def _find(self, tokens: Sequence[int], prompt_len: int) -> _Pool:
        prompt = tuple(tokens[:prompt_len])
        pool = self._pools.pop(prompt, None)
        if pool is None:
            pool = _Pool()
            pool.count(_text(prompt), 0)
            self.num_tokens += prompt_len
        self._pools[prompt] = pool
        return pool

    def _make_room(self) -> None:
        if self.num_tokens > self._max_tokens:
            for prompt in [p for p, pool in self._pools.items() if not pool.running]:
                self.num_tokens -= self._pools.pop(prompt).num_tokens
                if self.num_tokens <= self._max_tokens:
                    return


@final
class PhraseDrafter(SuffixDrafter):
    """Continues as the newest completions of any prompt do, at most `max_tokens` tokens of them."""

    def __init__(self, max_tokens: int = 200_000) -> None:
        super().__init__(max_tokens)
        self._all = _Pool()

    def _find(self, tokens: Sequence[int], prompt_len: int) -> _Pool:
        return self._all

    def _make_room(self) -> None:
        if self._all.num_tokens > self._max_tokens // 2:
            self.num_tokens = self._all.num_tokens
            self._all.age()


def _text(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))
