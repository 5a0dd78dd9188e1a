"""The EAGLE drafter's cache: recent features, keys and values of each request.

A row holds the features of consecutive tokens and, in the same slots, the drafter's keys and values
of the pairs that those features begin. Attention reads at most the last `window` slots; a full row
moves them to its front. So memory and time do not grow with the sequence.

    tokens     ... 57   58   59   60   61                  61 is the root
    slots           0    1    2    3                       base = 57, end = 4
    features        f    f    f    f
    keys, values    k    k    .    .    n  n  n            done = 2: two pairs to prefill, then
                                                           the nodes of a draft

A pair's key and value depend on its own feature and token alone, so the prefill after steps without
drafts is one exact pass over at most `window` pairs.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.drafter.eagle.layer import EagleConfig
from longtail.model.kernels.draft import Pending
from longtail.speculation.drafter import Draftable, Observed
from longtail.speculation.tree import MAX_NODES

_PROMPT_BYTES = 64 * 2**20
"""Bytes of prompt features that are kept for requests that start with shared KV."""
_MIN_PROMPTS = 16


@dataclass(slots=True)
class Window:
    """Row of one request; slot 0 holds token `base`."""

    row: int
    base: int
    end: int = 0
    """Number of slots with features."""
    done: int = 0
    """Number of slots with keys and values."""

    @property
    def next_token(self) -> int:
        """Index of the token whose feature comes next."""
        return self.base + self.end


@final
class Windows:
    """Rows of all requests. A request whose tokens are observed out of order starts over."""

    def __init__(self, config: EagleConfig, dtype: torch.dtype) -> None:
        self._window, self._config, self._dtype = config.window, config, dtype
        window, longest = config.window, config.target.max_positions
        self._room = 2 * window + MAX_NODES if window else longest
        self.of: dict[str, Window] = {}
        """By request id, of requests whose tokens were observed."""
        self._free: list[int] = []
        self._prompts: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        prompt_bytes = (window or longest) * config.feature_size * dtype.itemsize
        self._max_prompts = max(_MIN_PROMPTS, _PROMPT_BYTES // prompt_bytes)
        self.features = torch.empty(0, self._room, config.feature_size, dtype=dtype)
        self.keys = self.values = torch.empty(0, dtype=dtype)
        self._grow_rows(8)

    def forget(self, request_id: str) -> None:
        """Free the request's row, if it has one."""
        window = self.of.pop(request_id, None)
        if window is not None:
            self._free.append(window.row)

    def clear(self) -> None:
        """Drop everything, since features of an older policy are useless."""
        for request_id in list(self.of):
            self.forget(request_id)
        self._prompts.clear()

    def restart(self) -> None:
        """Drop keys and values, which depend on the drafter's weights; keep the features."""
        for window in self.of.values():
            window.done = 0

    def observe(self, seen: Sequence[Observed], features: Float[Tensor, "tokens features"]) -> None:
        """Append the features of observed tokens, all rows in one copy."""
        sources: list[int] = []
        targets: list[int] = []
        ends_prompt: list[tuple[Window, Observed]] = []
        first = 0
        for each in seen:
            window = self._window_at(each)
            kept = min(each.num_tokens, self._window or each.num_tokens)
            if window.end + kept > self._room:
                self._slide(window)
            if kept < each.num_tokens:  # earlier slots are outside the window
                window.base, window.end = each.start + each.num_tokens - kept, 0
                window.done = 0
            start = window.row * self._room + window.end
            targets += range(start, start + kept)
            sources += range(first + each.num_tokens - kept, first + each.num_tokens)
            window.end += kept
            first += each.num_tokens
            if each.start < each.prompt_len <= each.start + each.num_tokens:
                ends_prompt.append((window, each))
        flat = self.features.view(-1, self._config.feature_size)
        if len(sources) < first:
            features = features[torch.tensor(sources)]
        flat.index_copy_(0, torch.tensor(targets), features.to(self._dtype))
        for window, each in ends_prompt:
            self._keep_prompt(window, each)

    def catch_up(self, requests: Sequence[Draftable]) -> Pending:
        """Return the pairs to prefill, at most `window` a request; the caller computes them."""
        rows: list[int] = []
        slots: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        lasts: list[int] = []
        for request in requests:
            window = self.of[request.request_id]
            start = max(window.done, window.end - (self._window or window.end))
            start = min(start, window.end - 1)  # the round begins at the root pair
            rows += [window.row] * (window.end - start)
            slots += range(start, window.end)
            tokens += request.tokens[window.base + start + 1 : window.base + window.end + 1]
            positions += range(window.base + start, window.base + window.end)
            lasts.append(len(rows) - 1)
            window.done = window.end
        pairs = torch.tensor([rows, slots, tokens, positions])
        return Pending(
            pairs=pairs,
            lasts=torch.tensor(lasts),
            furthest=max(len(request.tokens) for request in requests) - 2,
        )

    def _window_at(self, seen: Observed) -> Window:
        """Return the request's window with `seen.start` as its next token."""
        window = self.of.get(seen.request_id)
        if window is None:
            if not self._free:
                self._grow_rows(max(8, self.features.shape[0]))
            window = Window(row=self._free.pop(), base=seen.start)
            self.of[seen.request_id] = window
            self._copy_prompt(window, seen)
        if window.next_token != seen.start:  # recomputed, or some tokens were not observed
            window.base, window.end, window.done = seen.start, 0, 0
        return window

    def _copy_prompt(self, window: Window, seen: Observed) -> None:
        """Copy the features of tokens whose KV came from another request, as far as they are kept.

        Without them the drafter attends to fewer tokens.
        """
        start = seen.start
        if not 0 < start <= seen.prompt_len:
            return
        prompt = tuple(seen.tokens[: seen.prompt_len])
        if prompt not in self._prompts:  # then that request has another prompt
            shared, others = prompt[:start], reversed(self._prompts)
            prompt = next((each for each in others if each[:start] == shared), prompt)
        kept = self._prompts.get(prompt)
        count = 0 if kept is None else len(kept) - (len(prompt) - start)
        if kept is not None and count > 0:  # those of a long prompt's end may not reach back
            self.features[window.row, :count] = kept[:count]
            window.base, window.end = start - count, count

    def _keep_prompt(self, window: Window, seen: Observed) -> None:
        prompt = tuple(seen.tokens[: seen.prompt_len])
        upto = seen.prompt_len - window.base
        if upto <= 0:  # the window begins after the prompt
            return
        start = max(0, upto - self._window) if self._window else 0
        self._prompts[prompt] = self.features[window.row, start:upto].clone()
        self._prompts.move_to_end(prompt)
        if len(self._prompts) > self._max_prompts:
            self._prompts.popitem(last=False)

    def _slide(self, window: Window) -> None:
        """Move the last `window` slots to the front of the row."""
        assert self._window, "an unbounded row holds the longest sequence"
        start = max(window.end - self._window, 0)
        for kept in (self.features, self.keys, self.values):
            kept[window.row, : window.end - start] = kept[window.row, start : window.end].clone()
        window.base += start
        window.end -= start
        window.done = max(window.done - start, 0)

    def _grow_rows(self, more: int) -> None:
        old = self.features.shape[0]
        own = self._config.shape
        heads = (self._room + MAX_NODES, own.num_kv_heads, own.head_dim)
        shapes = ((self._room, self._config.feature_size), heads, heads)
        grown = []
        for kept, shape in zip((self.features, self.keys, self.values), shapes, strict=True):
            larger = torch.zeros(old + more, *shape, dtype=self._dtype)
            if old:
                larger[:old] = kept
            grown.append(larger)
        self.features, self.keys, self.values = grown
        self._free += range(old, old + more)
