"""The statistics of a ridge drafter: sums over sequences, from which its weights follow.

The signal of a sequence at its token i, before and after which it is zero:

    z[i] = [state of i ; embedding of i]                Z[k] = sum over i of z[i] z[i + k]'

States and embeddings are rounded to whole numbers of a unit, so all products and their sums are
integers below 2^53, which float64 adds exactly: the order of sequences changes no bit. The weights
of slot k minimise, with the blocks of Z as all that is needed of the sequences,

    sum over i of | A x + T e - y |^2  +  RIDGE * (scaled weights)^2          (ridge regression)

    x   state of i, embedding of i + 1         e   embedding of i + k      y   state of i + k
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.drafter.ridge.layer import RidgeConfig
from longtail.drafter.weights import DRAFT_IDS, are_finite
from longtail.errors import CheckpointError, NonFiniteError
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import Observed, Taps
from longtail.system.tensor_files import Kind

RIDGE = 400.0
"""Penalty of a weight whose input has a mean square of 1; the best one was the same for 11,000 and
42,000 rows, and halved or doubled it moves the acceptance by less than one percent."""
_NORM_STEPS = 1024
"""Steps in the weight of the target's last norm; a state is at most sqrt(hidden) times as large."""
_EMBEDDING_STEPS = 4096
"""Steps in the largest entry of the embedding."""
_COUNT_STEPS = 1024
"""Steps in the count of a token that was written once."""
_CHUNK = 1024
"""Tokens from which finished sequences are added together, and that are added at once."""
MOST_DRAFTED = 8192
_FEWEST_DRAFTED = 64
_SLACK = 1.01
"""Factor for what rounding adds to products."""
_FEWEST_COUNTED = 0.5
"""Number of times that a token was written from which it is drafted; earlier ones count less."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LagSums:
    """The sums of some sequences."""

    products: Float[Tensor, "lags signal signal"]
    """Z[0], Z[1], ...; one lag more than slots. In float64 where they are added exactly."""
    steps: Float[Tensor, "signal"]
    """Step of each entry of the signal."""
    counts: Float[Tensor, "vocab"]
    """Number of times that each token was written."""

    @staticmethod
    def zeros(steps: Float[Tensor, "signal"], slots: int, vocab_size: int) -> "LagSums":
        """Return the sums of no sequence."""
        size = len(steps)
        return LagSums(
            products=steps.new_zeros(slots + 1, size, size),
            steps=steps,
            counts=steps.new_zeros(vocab_size),
        )

    @staticmethod
    def kinds(config: RidgeConfig) -> dict[str, Kind]:
        """Return what the tensors of a drafter's sums must be."""
        size, vocab_size = 2 * config.target.hidden_size, config.target.vocab_size
        return {
            "products": Kind(shape=(config.slots + 1, size, size)),
            "steps": Kind(shape=(size,)),
            "counts": Kind(shape=(vocab_size,)),
        }

    def check(self) -> None:
        """Raise NonFiniteError if no sequences have such sums: sizes bound their products."""
        sizes = self.products[0].diagonal().double().add(1).sqrt()
        most = 1 + _SLACK * sizes[:, None] * sizes
        if not all(bool((each.abs() <= most).all()) for each in self.products):
            raise NonFiniteError("products are larger than those of any sequence")
        if bool((self.steps <= 0).any() or (self.counts < 0).any()):
            raise NonFiniteError("a step or a count is not positive")
        self.solve(())

    @property
    def num_tokens(self) -> float:
        """Number of tokens, as far as they are not faded."""
        return float(self.counts.sum())

    def faded(self, factor: float) -> "LagSums":
        """Return the sums with every sequence weighted by a factor, rounded: they stay exact."""
        products = self.products.mul(factor).round_().add_(0.0)  # no -0.0
        counts = (self.counts * (factor * _COUNT_STEPS)).round() / _COUNT_STEPS
        return LagSums(products=products, steps=self.steps, counts=counts)

    def add(self, other: "LagSums") -> None:
        """Add the sums of other sequences."""
        assert torch.equal(self.steps, other.steps), "sums of one target"
        self.products.add_(other.products)
        self.counts.add_(other.counts)

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums by name."""
        return {"products": self.products, "steps": self.steps, "counts": self.counts}

    def restored(self, tensors: Mapping[str, Tensor]) -> "LagSums":
        """Return saved sums in these steps; CheckpointError if they are of another shape."""
        for name, own in self.tensors().items():
            if name not in tensors or tensors[name].shape != own.shape:
                raise CheckpointError(f"state of another drafter: {name} is missing or misshapen")
        by = tensors["steps"].to(self.steps) / self.steps
        return LagSums(
            products=(tensors["products"].to(by.device) * by[:, None] * by).round(),
            steps=self.steps,
            counts=tensors["counts"].to(self.counts),
        )

    def vocabulary(self, always: Sequence[int]) -> Int[Tensor, "draft"]:
        """Return the tokens to draft, ascending: `always`, and what was written, up to 8,192."""
        counts = self.counts.clone()
        counts[list(always)] = torch.inf
        num_written = int((counts >= _FEWEST_COUNTED).sum())
        size = min(max(num_written, _FEWEST_DRAFTED), MOST_DRAFTED, len(counts))
        return counts.argsort(descending=True, stable=True)[:size].sort().values

    def weights(
        self, always: Sequence[int], part: int = 0, num_parts: int = 1
    ) -> dict[str, Tensor]:
        """Return the drafter, or one of several parts of it; see `solve` and `vocabulary`."""
        found = self.solve(range(part, len(self.products) - 1, num_parts))
        return found | ({} if part else {DRAFT_IDS: self.vocabulary(always)})

    def solve(self, slots: Iterable[int]) -> dict[str, Float[Tensor, "..."]]:
        """Return the parameters of some slots of a `RidgeLayer`, counted from 0, in float32.

        Raises NonFiniteError if none follow.
        """
        try:
            found = self._solved(slots)
        except RuntimeError as error:  # of LAPACK, also if memory is out
            raise NonFiniteError(f"no weights follow from the sums ({error})") from error
        if not are_finite(found):
            raise NonFiniteError("the weights that follow from the sums overflow")
        return found

    @torch.no_grad()
    def _solved(self, slots: Iterable[int]) -> dict[str, Float[Tensor, "..."]]:
        """Solve; see `solve`.

        Inputs are first scaled to a mean square of 1, so that their units do not matter. One
        factorisation serves all slots: a slot's own input is eliminated by its Schur complement.
        Each slot is solved alone, so that no bit depends on the others.
        """
        sums, h = self.products, len(self.steps) // 2
        count, step = max(self.num_tokens, 1.0), self.steps.float()[:, None]
        states, embeddings = slice(None, h), slice(h, None)
        kept, moves = sums[0, states, states].double(), sums[0, embeddings, embeddings].double()
        scale, move_by = _scale(kept, count), _scale(moves, count)
        by = torch.cat((scale, move_by))
        gram = torch.cat((kept, sums[1, states, embeddings].T.double()))
        gram = torch.cat((gram, _later(sums, 1, embeddings).double()), 1) * by[:, None] * by
        own = moves * move_by[:, None] * move_by
        for each in (gram, own):
            each.diagonal().add_(RIDGE)
        # The factor is exact; the many right sides need float32 only.
        factor, own = torch.linalg.cholesky(gram).float(), own.float()
        by, move_by = by.float()[:, None], move_by.float()[:, None]
        own_wanted = sums[0, embeddings, states].float() * move_by
        found = dict[str, Tensor]()
        for slot in slots:
            right = _later(sums, slot + 1, states).float()
            if slot:
                cross = _later(sums, slot + 1, embeddings).float() * move_by.T
                right = torch.cat((right, cross), 1)
            right = torch.linalg.solve_triangular(factor, right * by, upper=False)
            wanted, cross = right[:, :h], right[:, h:]
            if slot:
                free = torch.linalg.cholesky(own - cross.T @ cross)
                move = torch.cholesky_solve(own_wanted - cross.T @ wanted, free)
                wanted = wanted - cross @ move
                move = move * move_by / step[embeddings]
                found[f"transitions.{slot - 1}.weight"] = (move * step[states].T).T.contiguous()
            weights = torch.linalg.solve_triangular(factor.T, wanted, upper=True) * by / step
            found[f"streams.{slot}.weight"] = (weights * step[states].T).T.contiguous()
        return found


def _later(
    products: Float[Tensor, "lags signal signal"], lag: int, columns: slice
) -> Float[Tensor, "signal columns"]:
    """Return the products of the shared inputs with columns of the signal `lag` tokens later."""
    h = products.shape[1] // 2
    return torch.cat((products[lag, :h, columns], products[lag - 1, h:, columns]))


def _scale(gram: Float[Tensor, "inputs inputs"], count: float) -> Float[Tensor, "inputs"]:
    """Return the factors that give inputs a mean square of 1."""
    return (gram.diagonal() / count).clamp_min(torch.finfo(torch.float32).tiny).rsqrt()


@final
class SequenceSums:
    """Adds up the sequences that a target finishes, as it observes them; `take` returns the sums.

    A sequence may come in parts, in order, with parts of others between. Tokens that are observed
    again count once. A sequence is added whole, when it has ended: one that is given up and written
    again counts once, where it ends.
    """

    def __init__(self, target: Transformer, slots: int) -> None:
        self._target, self._slots = target, slots
        norm = target.norm.weight.detach().double().abs()
        largest = target.embedding.weight.detach().abs().max().double()
        states = norm.clamp_min(float(norm.max()) / _NORM_STEPS) / _NORM_STEPS
        embeddings = (largest / _EMBEDDING_STEPS).expand(len(norm))
        self._steps = torch.cat((states, embeddings))
        """From the target's weights at construction, and so the same for all its sequences."""
        self.is_on = True
        """Whether to read what is observed."""
        self._begin()

    def _begin(self) -> None:
        self._sums = LagSums.zeros(self._steps, self._slots, self._target.config.vocab_size)
        self._ends: dict[str, int] = {}
        """Number of tokens of each sequence that were observed, its prompt included."""
        self._parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
        """Tokens and states of each sequence that has not ended."""
        self._waiting: list[tuple[Tensor, Tensor]] = []
        """Those of ended sequences that are not in the sums yet, each after tokens of -1."""
        self._num_waiting = 0

    @property
    def taps(self) -> Taps:
        """The state that the head reads."""
        return Taps(final=True)

    def take(self) -> LagSums:
        """Return the sums since the last call, on the CPU; other sequences are forgotten."""
        self._flush()
        taken = LagSums(**{name: each.cpu() for name, each in self._sums.tensors().items()})
        self._begin()
        return taken

    @torch.no_grad()
    def observe(self, seen: Sequence[Observed], features: Float[Tensor, "tokens hidden"]) -> None:
        """Read computed tokens, whose states are the rows of `features`."""
        first = -sum(each.num_tokens for each in seen) + len(features)
        for each in seen if self.is_on else ():
            # The last token counts for none: only if it was drafted, its state is computed.
            end = min(each.start + each.num_tokens, len(each.tokens) - 1)
            begin = self._ends.get(each.request_id, each.prompt_len)
            if each.start <= begin < end:  # else known, or without its beginning
                ids = torch.tensor(each.tokens[begin:end], device=features.device)
                states = features[first + begin - each.start : first + end - each.start]
                # A copy: a view would keep the states of all sequences of the step.
                self._parts.setdefault(each.request_id, []).append((ids, states.clone()))
                self._ends[each.request_id] = begin = end
            if each.is_finished and begin == len(each.tokens) - 1:
                self._end(self._parts.pop(each.request_id, []))
            first += each.num_tokens
        if self._num_waiting >= _CHUNK:
            self._flush()

    def _end(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Queue an ended sequence to be added; without parts it was, or has nothing to add."""
        for ids, states in parts[:1]:
            pad = ids.new_full((self._slots,), -1), states.new_zeros(self._slots, states.shape[1])
            self._waiting += [pad, *parts]
        self._num_waiting += sum(len(ids) for ids, _ in parts)

    @torch.no_grad()
    def _flush(self) -> None:
        """Add the waiting sequences to the sums."""
        if not self._num_waiting:
            return
        tokens, states = (torch.cat(each) for each in zip(*self._waiting, strict=True))
        self._waiting, self._num_waiting = [], 0
        for begin in range(0, len(tokens) - self._slots, _CHUNK):
            rows = slice(begin, begin + self._slots + _CHUNK)
            self._add(tokens[rows], states[rows])

    def _add(self, tokens: Int[Tensor, "rows"], states: Float[Tensor, "rows hidden"]) -> None:
        """Add consecutive rows; the first ones, as many as slots, are in the sums already.

        Products with embeddings are first summed by token: sequences have few different ones.
        """
        h, sums = states.shape[1], self._sums
        heads, is_new = (states.double() / self._steps[:h]).round(), tokens >= 0
        is_new[: self._slots] = False
        sums.counts.index_add_(0, tokens[is_new], heads.new_ones(int(is_new.sum())))
        distinct, places = torch.unique(tokens, return_inverse=True)
        embedding = self._target.embedding(distinct.clamp(min=0)).double() / self._steps[h:]
        embedding = embedding.round() * (distinct >= 0)[:, None]
        signal, count = torch.cat((heads, embedding[places]), 1), len(heads)
        # A product belongs to its later token.
        later = heads * is_new[:, None]
        for lag, products in enumerate(sums.products):
            begins = count - lag
            products[:h, :h].addmm_(heads[:begins].T, later[lag:])
            earlier = signal[:begins] * is_new[lag:, None]
            by_token = signal.new_zeros(len(embedding), signal.shape[1])
            products[:, h:].addmm_(by_token.index_add_(0, places[lag:], earlier).T, embedding)
            by_token = heads.new_zeros(len(embedding), h)
            by_token.index_add_(0, places[:begins], later[lag:])
            products[h:, :h].addmm_(embedding.T, by_token)
