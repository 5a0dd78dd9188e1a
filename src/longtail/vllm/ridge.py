"""The ridge drafter that vLLM learns while it generates, for both model runners.

    keep       states and tokens of a step's rows --> buffer
    learn      buffer --> sums (`drafter.ridge.sums`) --> weights, when the rows have doubled
    propose    state and token of each request's end --> a chain of drafts

Solution, vocabulary and files of the sums are those of longtail's engine. That adds whole texts in
float64, exactly, and drafts trees; here rows of many texts come at once, in tensors of fixed shape.

It needs three parts of the target: its input embedding, its final states and its head. A row is
paired with another of the same request by its position, within one buffer; so no row is ever paired
with a stale state, even if requests end or change their places in the batch. Nothing here waits
for the device except a solve; sums have a stream of their own. With tensor parallelism every rank
takes the same decisions, from numbers that the host knows, and the weights of the first rank.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from longtail.drafter.ridge.sums import MOST_DRAFTED, LagSums
from longtail.drafter.weights import DRAFT_IDS
from longtail.errors import ConfigError, NonFiniteError

logger = logging.getLogger("vllm.plugins.longtail")

FIRST_SOLVE = 256
"""Tokens before the first solve; each further one waits for twice as many."""
_ALL_TOKENS = 16_384
"""Tokens after a change of the policy that are all learned from; later one in `_SHARE`."""
_SHARE = 4
_MOST_TOKENS = 131_072
"""Tokens from which earlier ones count half, as sums in float32 lose the last of more."""
_BUFFER = 3072
"""Rows that are added at once; of each request's in a step only the accepted ones count."""
_FADE = 0.25
"""Weight of earlier rows after a change of the policy."""
_SPAN = 1 << 32
"""Distance between the keys of two requests; their positions are less."""

SlotDraw = Callable[[int, Float[Tensor, "requests draft"], Int[Tensor, "draft"]], Tensor]
"""Returns a token for each request, given the slot (from 0), the logits and their tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of the target that a block reads."""

    embed: Callable[[Int[Tensor, "tokens"]], Float[Tensor, "tokens hidden"]]
    head: Any
    """vLLM's `ParallelLMHead`, or the embedding that it is tied to."""
    scale: float
    soft_cap: float | None
    hidden_size: int
    vocab_size: int
    device: torch.device
    dtype: torch.dtype

    @staticmethod
    def of(model: Any, config: Any) -> "Parts":
        """Find the parts of vLLM's model; ConfigError names what is missing."""
        text = model.get_language_model() if hasattr(model, "get_language_model") else model
        head: Any = getattr(text, "lm_head", None)
        processor: Any = getattr(text, "logits_processor", None)
        weight: Any = getattr(head, "weight", None)
        embed: Any = getattr(text, "embed_input_ids", None)
        for is_missing, part in (
            (embed is None, "no embed_input_ids"),
            (processor is None or head is None, "no head of its own"),
            (weight is None or not weight.is_floating_point(), "a head with quantised weights"),
        ):
            if is_missing:
                raise ConfigError(
                    f"longtail in vLLM: {type(text).__name__} has {part}, which a learned drafter "
                    "reads; use another drafter"
                )
        return Parts(
            embed=_without_adapters(embed, text),
            head=head,
            scale=float(processor.scale),
            soft_cap=processor.soft_cap,
            hidden_size=int(weight.shape[1]),
            vocab_size=int(processor.org_vocab_size),
            device=weight.device,
            dtype=config.model_config.dtype,
        )

    def rows(self, ids: Int[Tensor, "draft"]) -> tuple[Tensor, Tensor | None]:
        """Return the head's rows of these tokens, and their biases; with all ranks together."""
        weight, bias = self.head.weight, getattr(self.head, "bias", None)
        shard = getattr(self.head, "shard_indices", None)
        if shard is None or getattr(self.head, "tp_size", 1) == 1:
            return weight[ids].to(self.dtype), None if bias is None else bias[ids]
        from vllm.distributed import tensor_model_parallel_all_reduce

        first, end = shard.org_vocab_start_index, shard.org_vocab_end_index
        is_mine = (ids >= first) & (ids < end)
        places = (ids - first).clamp(0, end - first - 1)
        found = weight[places].to(self.dtype) * is_mine[:, None]
        biases = None if bias is None else tensor_model_parallel_all_reduce(bias[places] * is_mine)
        return tensor_model_parallel_all_reduce(found), biases

    def of_first_rank(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of the first rank: all ranks must draft the same tokens."""
        if getattr(self.head, "tp_size", 1) == 1:
            return weights
        from vllm.distributed import get_tp_group

        return get_tp_group().broadcast_tensor_dict(weights, src=0) or {}


def _without_adapters(embed: Callable[[Tensor], Tensor], model: Any) -> Callable[[Tensor], Tensor]:
    """Return an embedding of any tokens: that of an engine with adapters reads a step's alone."""
    held: list[tuple[Any, Any]] = [
        (each, getattr(each, "base_layer", None)) for each in model.modules()
    ]
    adapted = [(each, base) for each, base in held if hasattr(base, "num_embeddings")]

    def plain(tokens: Tensor) -> Tensor:
        for module, base in adapted:
            module.forward = base.forward
        found = embed(tokens)
        for module, _ in adapted:
            del module.forward
        return found

    return plain if adapted else embed


@final
class Block:
    """Learns and drafts; `depth` tokens at most."""

    def __init__(self, parts: Parts, depth: int, max_running: int) -> None:
        self.parts, self.depth = parts, depth
        steps = torch.ones(2 * parts.hidden_size, device=parts.device)
        self._sums = LagSums.zeros(steps, depth, parts.vocab_size)
        self._room = max(_BUFFER, max_running * (depth + 1))
        # One row more, for what is not kept.
        shape = self._room + 1, parts.hidden_size
        self._states = torch.empty(shape, device=parts.device, dtype=parts.dtype)
        self._tokens = torch.zeros(shape[:1], device=parts.device, dtype=torch.int64)
        self._keys = torch.full(shape[:1], -1, device=parts.device)
        self._num_held = self.num_solved = 0
        self._begin()
        cuda: Any = torch.cuda
        self._stream: Any = cuda.Stream() if parts.device.type == "cuda" else None
        self._maps: list[Tensor] = []
        """Maps of the slots from a state, the embedding of the root and of the draft before."""
        self._ids = self._drafted = torch.empty(0, device=parts.device, dtype=torch.int64)
        self._head: tuple[Tensor, Tensor | None] = (torch.empty(0), None)

    def _begin(self) -> None:
        """Count the tokens of a policy, from none on; each request of a step has one at least."""
        self._num_seen = self._flushed = self._resumes = 0
        self._next_solve = FIRST_SOLVE

    @property
    def is_ready(self) -> bool:
        """Whether there are weights to draft with."""
        return bool(self._maps)

    @property
    def sums(self) -> LagSums:
        """The sums of all rows, for the present stream; a GPU adds to them on another one."""
        if self._num_held:
            self._flush()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._sums

    @contextmanager
    def _aside(self, *read: Tensor) -> Iterator[None]:
        """Work beside the steps of a GPU, after what is queued so far; `read` may then be gone."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        for each in read:  # else the next step could take their memory
            each.record_stream(self._stream)

    def reserve(self, num_requests: int) -> list[int]:
        """Return the first place in the buffer for each request's rows of a step.

        It is -1 if they are not learned from.
        """
        self._num_seen += num_requests
        if self._num_seen < self._resumes:
            return [-1] * num_requests
        first, rows = self._num_held, self.depth + 1
        if first + num_requests * rows > self._room:
            self._flush()
            first = 0
        self._num_held = first + num_requests * rows
        return list(range(first, self._num_held, rows))

    def keep(
        self,
        first: Int[Tensor, "requests"],
        requests: Int[Tensor, "requests"],
        states: Float[Tensor, "requests rows hidden"],
        tokens: Int[Tensor, "requests rows"],
        positions: Int[Tensor, "requests rows"],
        counts: Bool[Tensor, "requests rows"],
    ) -> None:
        """Write a step's rows to the buffer, those of a request from its `first` on; -1: nowhere.

        They are the last `depth` + 1 rows of a request, which has a number that no other one ever
        has. A row counts if its token was generated and its state stands.
        """
        at = first[:, None] + torch.arange(self.depth + 1, device=first.device)
        at = torch.where(first[:, None] < 0, -1, at)
        self._states[at], self._tokens[at] = states.to(self._states.dtype), tokens
        self._keys[at] = (requests[:, None] * _SPAN + positions).where(counts, -1)

    @torch.inference_mode()
    def learn(self) -> None:
        """Add the buffer's rows and solve, once there are enough tokens."""
        if self._num_seen >= max(self._next_solve, self._resumes) and self._num_held:
            self._flush()
            self.solve()
            self._next_solve = 2 * self._num_seen

    @torch.inference_mode()
    def _flush(self) -> None:
        """Add the buffer's rows to the sums."""
        held, self._num_held = self._num_held, 0
        if self._num_seen > _ALL_TOKENS:
            self._resumes = self._num_seen + (_SHARE - 1) * (self._num_seen - self._flushed)
        self._flushed = max(self._num_seen, self._resumes)
        # Copies, as the next step writes there; embedded in the order of the steps, by all ranks.
        states, tokens, keys = (
            each[:held].clone() for each in (self._states, self._tokens, self._keys)
        )
        embedded = self.parts.embed(tokens)
        with self._aside(states, tokens, keys, embedded):
            self._add(states, tokens, keys, embedded)

    def _add(self, states: Tensor, tokens: Tensor, keys: Tensor, embedded: Tensor) -> None:
        keys, order = keys.sort(stable=True)
        # A row may come twice, as after a preemption; the first of equal keys counts.
        counts = keys >= 0
        counts[1:] &= keys[1:] != keys[:-1]
        if keys.device.type == "cpu":  # a GPU would wait for it
            kept = counts.nonzero()[:, 0]
            keys, order, counts = keys[kept], order[kept], counts[kept]
        sums = self._sums
        sums.counts.index_add_(0, tokens[order], counts.to(sums.counts.dtype))
        signal = torch.cat((states[order], embedded[order]), 1) * counts[:, None]
        for lag, products in enumerate(sums.products):
            wanted = keys - lag
            places = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
            pairs = counts & (keys[places] == wanted)
            _add_product(products, signal[places] * pairs[:, None], signal)

    def solve(self) -> None:
        """Take the weights that follow from the sums; keep the old ones, and warn, if none do."""
        began, found = time.perf_counter(), dict[str, Tensor]()
        try:
            with self._aside():
                found = self._sums.weights(())
        except NonFiniteError as error:
            logger.warning("longtail: the learned drafter keeps its weights: %s", error)
        sums, found = self.sums, self.parts.of_first_rank(found)
        if not found:
            return
        self.take(found)
        self.num_solved += 1
        logger.info(
            "longtail: the drafter has learned from %d tokens (%d distinct), solved in %.2f s",
            int(sums.num_tokens), len(self._ids), time.perf_counter() - began,
        )  # fmt: skip
        if sums.num_tokens >= _MOST_TOKENS:
            self._fade(0.5)

    @torch.inference_mode()
    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Draft with the parameters of a `RidgeLayer` and a draft vocabulary."""
        device, dtype = self.parts.device, self.parts.dtype
        maps = [[weights[f"streams.{slot}.weight"]] for slot in range(self.depth)]
        for slot, each in enumerate(maps[1:]):
            each.append(weights[f"transitions.{slot}.weight"])
        self._maps = [torch.cat(each, 1).to(device, dtype) for each in maps]
        self._ids = self._drafted = weights[DRAFT_IDS].to(device)
        if device.type != "cpu":  # of one shape: a token's noise is the same, however often there
            missing = min(MOST_DRAFTED, self.parts.vocab_size) - len(self._ids)
            self._drafted = torch.cat((self._ids, self._ids[:1].expand(max(missing, 0))))
        self._head = self.parts.rows(self._drafted)

    def tensors(self) -> dict[str, Tensor]:
        """Return what `take` takes."""
        width, found = 2 * self.parts.hidden_size, {DRAFT_IDS: self._ids}
        for slot, each in enumerate(self._maps):
            found[f"streams.{slot}.weight"] = each[:, :width]
            if slot:
                found[f"transitions.{slot - 1}.weight"] = each[:, width:]
        return found

    def resume(self, sums: Mapping[str, Tensor]) -> None:
        """Go on with saved sums, whatever their steps; without any, learn anew."""
        if {"products", "steps", "counts"} <= sums.keys():
            by = sums["steps"].to(self.sums.products)
            for own, saved in zip(self._sums.products, sums["products"], strict=False):
                own.copy_(saved.to(own) * by[:, None] * by)
            self._sums.counts.copy_(sums["counts"])

    def renew(self) -> None:
        """Follow a new policy: earlier rows count less, those in the buffer not at all."""
        self._num_held = 0
        self._begin()
        self._fade(_FADE)
        if self.is_ready:
            self._head = self.parts.rows(self._drafted)

    def _fade(self, factor: float) -> None:
        with self._aside():
            self._sums.products.mul_(factor)
            self._sums.counts.mul_(factor)

    def propose(
        self,
        states: Float[Tensor, "requests hidden"],
        roots: Int[Tensor, "requests"],
        depth: int,
        draw: SlotDraw,
    ) -> Int[Tensor, "requests depth"]:
        """Draft chains: `states` are those before the roots."""
        inputs = torch.cat((states.to(self.parts.dtype), self._embedded(roots)), 1)
        drafts: list[Tensor] = []
        for slot, each in enumerate(self._maps[:depth]):
            given = torch.cat((inputs, self._embedded(drafts[-1])), 1) if slot else inputs
            drafts.append(draw(slot, self._logits(given @ each.T), self._drafted))
        return torch.stack(drafts, 1)

    def _embedded(self, tokens: Int[Tensor, "requests"]) -> Float[Tensor, "requests hidden"]:
        return self.parts.embed(tokens).to(self.parts.dtype)

    def _logits(self, states: Float[Tensor, "requests hidden"]) -> Float[Tensor, "requests draft"]:
        weight, bias = self._head
        logits = nn.functional.linear(states, weight, bias)
        if self.parts.soft_cap is not None:
            logits = torch.tanh(logits / self.parts.soft_cap) * self.parts.soft_cap
        return logits * self.parts.scale


def _add_product(
    total: Float[Tensor, "m n"], left: Float[Tensor, "rows m"], right: Float[Tensor, "rows n"]
) -> None:
    """Add left' right in float32: products of bfloat16 are exact in it."""
    if left.is_cuda and left.dtype == torch.bfloat16:
        total += torch.mm(left.T, right, out_dtype=torch.float32)
    else:
        total.addmm_(left.T.float(), right.float())
