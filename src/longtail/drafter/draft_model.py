"""A small language model as drafter: any supported Hugging Face model with the target's tokenizer.

It reads tokens, not features, and keeps keys and values of each request's whole text. It is never
trained. An EAGLE layer drafts better at a lower cost.

    row of a request     p p p p g g g | n n n        text, then the nodes of a draft
"""

import time
from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.drafter.eagle.nodes import NodePlaces
from longtail.model.graphs import GraphedPass
from longtail.model.kernels.choice import select_kernels
from longtail.model.kernels.ops import CachedAttention, Places, text_places
from longtail.model.transformer import ModelConfig, Transformer
from longtail.speculation.confidence import ConfidenceCurve
from longtail.speculation.depth import select_depth_policy
from longtail.speculation.drafter import Draftable, Drafter, Noise, Observed
from longtail.speculation.grow import Frontier, Scoring, Walker, deepest, grow
from longtail.speculation.strategy import Strategy
from longtail.speculation.taps import NO_TAPS, Taps
from longtail.speculation.tree import EMPTY, MAX_NODES, DraftTree
from longtail.speculation.verify import Accepted

_FIRST_ROWS = 4


@final
class ModelDrafter(Drafter):
    """Drafts with a model that shares the target's vocabulary."""

    def __init__(self, model: Transformer) -> None:
        self._model = model.eval()
        self._model.pack()
        self._texts = _Texts(model.config, model.dtype, model.device)
        self._passes = _Passes(model, self._texts)
        self._curve = ConfidenceCurve()
        self._depth_policy = select_depth_policy(model.device)
        self._forward_s = 0.0

    @property
    def taps(self) -> Taps:
        """No features."""
        return NO_TAPS

    @property
    def forward_s(self) -> float:
        """Seconds of passes of the model."""
        return self._forward_s

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of node confidences so far."""
        return self._curve.calibration_error()

    def observe(
        self, seen: Sequence[Observed], features: Float[Tensor, "tokens features"] | None
    ) -> None:
        """Do nothing; `propose` reads the tokens."""

    def learn(self, trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        """Update the confidence curve."""
        for tree, found in zip(trees, accepted, strict=True):
            self._curve.learn(tree, found)

    def forget(self, request_id: str) -> None:
        """Free the request's row."""
        self._texts.forget(request_id)

    def refresh(self) -> None:
        """Do nothing; the model does not depend on the target."""

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Draft for all requests; EMPTY for all if a text would exceed the model's positions."""
        limit = self._model.config.max_positions
        if max(len(each.tokens) for each in requests) + deepest(requests, strategy) > limit:
            return [EMPTY] * len(requests)
        scoring = Scoring(requests=requests, noise=noise, device=self._model.device)
        walker = _ModelWalker(self._passes, self._texts, requests, self._model.device)
        trees = grow(walker, scoring, strategy, self._curve, self._depth_policy)
        self._forward_s += walker.seconds
        return trees


@final
class _Texts:
    """Keys and values of the requests' texts, one row each; slots are positions."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._rows: dict[str, int] = {}
        self._free = list(range(_FIRST_ROWS))
        self.done: dict[str, int] = {}
        """Number of tokens of each request whose keys and values are stored."""
        self.storage = self._allocate(_FIRST_ROWS)

    def _allocate(self, rows: int) -> Tensor:
        """Allocate rows for the longest text; a CPU commits the memory only when it is written."""
        c = self._config
        shape = (c.num_layers, 2, rows, self.spare_slot + 1, c.num_kv_heads, c.head_dim)
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        size = torch.empty((), dtype=self._dtype).element_size()
        flat = np.zeros(int(np.prod(shape)) * size, dtype=np.uint8)
        return torch.from_numpy(flat).view(self._dtype).view(shape)

    @property
    def spare_slot(self) -> int:
        """Slot after those of any draft, to which padding writes."""
        return self._config.max_positions + MAX_NODES

    def row(self, request_id: str) -> int:
        """Return the request's row; assign one if it has none."""
        if request_id not in self._rows:
            if not self._free:
                self._grow_rows()
            self._rows[request_id], self.done[request_id] = self._free.pop(), 0
        return self._rows[request_id]

    def _grow_rows(self) -> None:
        old = self.storage
        rows = old.shape[2]
        self.storage = self._allocate(2 * rows)
        for request_id, row in self._rows.items():
            done = self.done[request_id]
            self.storage[:, :, row, :done] = old[:, :, row, :done]
        self._free += range(rows, self.storage.shape[2])

    def forget(self, request_id: str) -> None:
        """Free the request's row, if it has one."""
        if request_id in self._rows:
            self._free.append(self._rows.pop(request_id))
            del self.done[request_id]


@final
class _Passes:
    """The model and its head as passes over tokens; captured on a GPU."""

    def __init__(self, model: Transformer, texts: _Texts) -> None:
        config, device = model.config, model.device
        self._model, self._texts = model, texts
        self._kernels = select_kernels(model.dtype, device, config.head_dim)
        padding = torch.tensor([0, 0, 0, texts.spare_slot, 0, 0, 0], device=device)
        hidden = torch.zeros(config.hidden_size, dtype=model.dtype, device=device)
        self._read = GraphedPass(model.graphs, self._compute, [padding])
        self._score = GraphedPass(model.graphs, lambda hidden: (model.logits(hidden),), [hidden])

    def read(
        self, tokens: Int[Tensor, "tokens"], positions: Int[Tensor, "tokens"], places: Places
    ) -> Float[Tensor, "tokens hidden"]:
        """Store keys and values of tokens, and return their final hidden states."""
        numbers = torch.stack((tokens, positions, *places), 1)
        # The number of rows is the key of the storage, which is replaced when rows are added.
        (hidden,) = self._read(numbers, key=self._texts.storage.shape[2])
        return hidden

    def score(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocab"]:
        """Return the logits of the next tokens."""
        (logits,) = self._score(hidden)
        return logits

    def _compute(self, numbers: Int[Tensor, "tokens 7"]) -> tuple[Tensor]:
        tokens, positions, *places = numbers.T.contiguous()
        attention = CachedAttention(self._texts.storage, self._kernels, Places(*places))
        return (self._model(tokens, positions, attention),)


@final
class _ModelWalker(Walker):
    """One draft round."""

    def __init__(
        self, passes: _Passes, texts: _Texts, requests: Sequence[Draftable], device: torch.device
    ) -> None:
        self._passes, self._texts, self._requests = passes, texts, requests
        self._rows = [texts.row(each.request_id) for each in requests]
        ends = [len(each.tokens) for each in requests]
        self._nodes = NodePlaces(*torch.tensor([self._rows, ends], device=device))
        self._device = device
        self.seconds = 0.0
        """Seconds of forward passes."""

    def root(self) -> Float[Tensor, "requests vocab"]:
        """Prefill the new tokens of every text, and score the successors of the roots."""
        rows: list[int] = []
        slots: list[int] = []
        tokens: list[int] = []
        lasts: list[int] = []
        for request, row in zip(self._requests, self._rows, strict=True):
            start, end = self._texts.done[request.request_id], len(request.tokens)
            rows += [row] * (end - start)
            slots += range(start, end)
            tokens += request.tokens[start:end]
            lasts.append(len(rows) - 1)
            self._texts.done[request.request_id] = end
        flat = torch.tensor([rows, slots, tokens], device=self._device)
        ends = torch.tensor(lasts, device=self._device)
        started = time.perf_counter()
        hidden = self._passes.read(flat[2], flat[1], text_places(flat[0], flat[1]))
        logits = self._passes.score(hidden[ends])
        self.seconds += time.perf_counter() - started
        return logits

    def descend(self, frontier: Frontier) -> Float[Tensor, "nodes vocab"]:
        """Score the successors of the next level's nodes."""
        places = self._nodes.place(frontier)
        positions = places.contexts + (frontier.depth - 1)
        started = time.perf_counter()
        logits = self._passes.score(self._passes.read(frontier.tokens, positions, places))
        self.seconds += time.perf_counter() - started
        return logits
