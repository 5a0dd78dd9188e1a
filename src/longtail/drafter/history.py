"""Drafting from what has been written already: suffixes of history, no weights.

The last few tokens of a request are looked up in everything written after the same prompt: by the
request itself, by the other completions of its group, running or finished, and in earlier epochs.
The longest known context speaks; no shorter one is asked.

    written so far     a b c d,  a b c d,  x b c e
    the request        .. a b c                            c is the root
    known contexts     a b c: d twice      b c and c: d twice, e once
    draft              d

A child is wrong because another known continuation came, or because something new came. Counts and
noise tell the first danger, not the second: of a lone continuation the noise says next to nothing
(measured), the length of the context much. A margin is the smaller of two leads, one for each.

It owns counts of continuations, pooled by prompt, and how far each request's text is counted. It
knows no policy: history outlives an update of the weights, and the confidence curve follows.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from math import log
from typing import final

from jaxtyping import Float
from torch import Tensor

from longtail.speculation.confidence import EDGES, ConfidenceCurve
from longtail.speculation.drafter import Draftable, Drafter, Noise, Observed
from longtail.speculation.strategy import DraftThresholds, Strategy
from longtail.speculation.taps import NO_TAPS, Taps
from longtail.speculation.tree import DraftTree
from longtail.speculation.verify import Accepted

_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Tokens of the contexts that are kept. A child's longest known one is at most one entry longer."""
_ALWAYS_KEPT = 4
"""A longer context is kept only where the next shorter one was known already; else that will do."""
_UNLIKELY = 0.02
"""Nodes reached less often than this cost more to verify than they give."""
_SHIFT = 24
"""A lone continuation is one integer: the token, and above these bits how often it came."""
_TOKEN = (1 << _SHIFT) - 1

Continuations = int | dict[int, int]
"""What came after a context: a lone token with its count, or the counts of several."""


@final
@dataclass(slots=True)
class _Pool:
    """How the contexts in one prompt's texts went on.

    Texts are strings, a character a token: nothing in Python is sliced and hashed faster. Contexts
    are known by their hash: two that share one could spoil a draft, never a token.
    """

    after: dict[int, Continuations] = field(default_factory=dict)
    num_tokens: int = 0
    running: dict[str, int] = field(default_factory=dict)
    """Requests in progress, and how many tokens of each are counted."""

    def count(self, text: str, first: int, lengths: Sequence[int]) -> None:
        """Count each character from `first` on as what came after those before it."""
        after = self.after
        self.num_tokens += len(text) - first
        for place in range(first, len(text)):
            token = ord(text[place])
            for length in lengths:
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
    """Where one request's draft begins, what is known there, and its row of the noise, if any."""

    text: str
    after: dict[int, Continuations]
    lengths: Sequence[int]
    noise: Callable[[int], memoryview] | None
    """g[request, v] by depth; memoryviews are indexed faster than arrays."""
    row: int

    def children(self, text: str, longest: int, level: int) -> tuple[int, list[tuple[float, int]]]:
        """Rank what came after the longest known context, from entry `longest` of lengths down.

        First comes the entry from which on to look for a child's.
        """
        after, lengths = self.after, self.lengths
        for entry in range(min(longest, len(lengths) - 1), -1, -1):
            context = text[-lengths[entry] :]
            known = after.get(hash(context))
            if known is not None:
                length = len(context)
                if isinstance(known, int):
                    return entry + 1, [(log((known >> _SHIFT) * length * length), known & _TOKEN)]
                return entry + 1, self.ranked(known, length, level)
        return 0, []

    def ranked(self, known: dict[int, int], length: int, level: int) -> list[tuple[float, int]]:
        """Return margin and token of what came after a context of `length` tokens, best first.

        With q(v) proportional to the counts, scores are log q(v), plus g when coupled. A token not
        seen here is a rival `safe` behind. PPM's method C (Moffat 1990) takes the odds against one
        as count / different tokens; they grow with the context, measured as its length squared.
        """
        if self.noise is None:
            scored = [(log(count), token) for token, count in known.items()]
        else:
            noise, row = self.noise(level), self.row
            scored = [(log(count) + noise[row, token], token) for token, count in known.items()]
        scored.sort(reverse=True)
        safe = log(sum(known.values()) * length * length / len(known))
        (best, first), (second, _) = scored[:2]
        behind = [(min(score - best, safe), token) for score, token in scored[1:]]
        return [(min(best - second, safe), first), *behind]


@final
class HistoryDrafter(Drafter):
    """Proposes what came next before; where several things did, what the noise makes of them.

    When the pools hold more than `max_tokens` tokens together, those of the prompts asked longest
    ago go, unless a request is in progress. A token takes 200 (texts much alike) to 500 bytes.
    """

    def __init__(self, *, max_tokens: int = 1_000_000, max_context: int = 8) -> None:
        assert max_context >= 1, f"max_context {max_context}"
        self._max_tokens = max_tokens
        self._lengths = tuple(length for length in _LENGTHS if length <= max_context)
        self._pools: dict[tuple[int, ...], _Pool] = {}
        """By the tokens of the prompt, the one asked last at the end."""
        self._running: dict[str, _Pool] = {}
        self._num_tokens = 0
        self._curve = ConfidenceCurve()

    @property
    def taps(self) -> Taps:
        """No feature is needed."""
        return NO_TAPS

    @property
    def num_tokens(self) -> int:
        """Tokens held, prompts included."""
        return self._num_tokens

    def propose(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Draft along the longest known contexts; EMPTY where the last token is new."""
        levels = None
        if noise is not None:  # a depth is read when somebody first has a choice there
            levels = cache(lambda depth: noise.at_depth(depth).cpu().numpy().data)
        farthest = self._lengths[-1]
        trees = []
        for row, request in enumerate(requests):
            pool = self._pool(request.request_id, request.tokens, request.prompt_len)
            own = levels if request.sampling.temperature > 0.0 else None
            root = _Root(_text(request.tokens[-farthest:]), pool.after, self._lengths, own, row)
            depth = min(strategy.depth, strategy.num_nodes, request.max_depth)
            if strategy.width == 1:
                trees.append(self._chain(root, depth, strategy.thresholds))
            else:
                trees.append(self._tree(root, depth, strategy))
        return trees

    def _chain(self, root: _Root, depth: int, worth: DraftThresholds) -> DraftTree:
        """Follow the best child: `_tree` of width 1, in fewer steps."""
        table, reach, text, longest = self._curve.table(), 1.0, root.text, len(self._lengths)
        floor, extend = max(worth.verify, _UNLIKELY), worth.expand
        tokens: list[int] = []
        margins: list[float] = []
        likely: list[float] = []
        for level in range(1, depth + 1):
            longest, ranked = root.children(text, longest, level)
            if not ranked:
                break
            margin, token = ranked[0]
            reach *= table[bisect_right(EDGES, margin)]
            if reach < floor:
                break
            tokens.append(token)
            margins.append(margin)
            likely.append(reach)
            if reach < extend:
                break
            text += chr(token)
        return DraftTree(
            tokens=tuple(tokens),
            parents=tuple(range(len(tokens))),
            margins=tuple(margins),
            reach=tuple(likely),
        )

    def _tree(self, root: _Root, depth: int, strategy: Strategy) -> DraftTree:
        """Take the likeliest node first; draft on the first ones taken of a level, the beam.

        A node is never likelier than its parent: this is growing level by level, then pruning.
        """
        table, width, size = self._curve.table(), strategy.width, strategy.num_nodes
        beam, extend = strategy.num_expanded, strategy.thresholds.expand
        floor = max(strategy.thresholds.verify, _UNLIKELY)
        tokens: list[int] = []
        parents: list[int] = []
        margins: list[float] = []
        likely: list[float] = []
        # Best first: reach and margin, both negative, and what the node would be made of.
        waiting: list[tuple[float, float, int, int, str, int, int]] = []
        followed = [0] * depth
        reach, text, longest, level = -1.0, root.text, len(self._lengths), 0
        while True:
            if level < depth and followed[level] < beam and -reach >= extend:
                followed[level] += 1
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
        """Count what was not counted yet; text that is computed anew has been."""
        for each in seen:
            pool = self._pool(each.request_id, each.tokens, each.prompt_len)
            first, end = pool.running[each.request_id], each.start + each.num_tokens
            if end > first:
                begin = max(first - self._lengths[-1], 0)
                pool.count(_text(each.tokens[begin:end]), first - begin, self._lengths)
                pool.running[each.request_id] = end
                self._num_tokens += end - first
        self._make_room()

    def learn(self, trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        """Learn how sure a margin is."""
        for tree, found in zip(trees, accepted, strict=True):
            self._curve.learn(tree, found)

    def forget(self, request_id: str) -> None:
        """Note that the request is no longer in progress; its text stays."""
        pool = self._running.pop(request_id, None)
        if pool is not None:
            del pool.running[request_id]
            self._make_room()

    def refresh(self) -> None:
        """Keep the text, and no request in progress: some may have ended unheard."""
        for request_id in list(self._running):
            self.forget(request_id)

    @property
    def forward_s(self) -> float:
        """There is no forward pass."""
        return 0.0

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of node confidences so far."""
        return self._curve.calibration_error()

    def _pool(self, request_id: str, tokens: Sequence[int], prompt_len: int) -> _Pool:
        """Return the pool of the request's prompt; a new prompt is counted first."""
        pool = self._running.get(request_id)
        if pool is None:
            prompt = tuple(tokens[:prompt_len])
            pool = self._pools.pop(prompt, None)
            if pool is None:
                pool = _Pool()
                pool.count(_text(prompt), 0, self._lengths)
                self._num_tokens += prompt_len
            self._pools[prompt] = self._running[request_id] = pool
            pool.running[request_id] = prompt_len
        return pool

    def _make_room(self) -> None:
        if self._num_tokens > self._max_tokens:
            for prompt in [p for p, pool in self._pools.items() if not pool.running]:
                self._num_tokens -= self._pools.pop(prompt).num_tokens
                if self._num_tokens <= self._max_tokens:
                    return


def _text(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))
