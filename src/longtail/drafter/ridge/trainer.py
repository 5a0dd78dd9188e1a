"""Training of a ridge drafter: a step adds the sums of a batch; the weights follow from them.

Every batch adds products of its states and embeddings to sums in float64, so a stop at any moment
loses nothing. The weights of slot k minimise

    sum over pairs of | A x + T e - y |^2  +  RIDGE * (scaled weights)^2          (ridge regression)

    x   state of i, embedding of i + 1, and 1      e   embedding of i + k      y   state of i + k

A text that ends before i + k counts its last token again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.drafter.eagle.fit import RIDGE
from longtail.drafter.eagle.loss import DepthReport, Teacher, score_rows
from longtail.drafter.eagle.unroll import Pairs
from longtail.drafter.ridge.layer import RidgeConfig, RidgeLayer
from longtail.drafter.training.reader import TargetReader
from longtail.drafter.training.trainer import TrainerReport
from longtail.errors import CheckpointError, DataError
from longtail.model.transformer import Transformer
from longtail.rl.packing import moved
from longtail.types import PackedSequences


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """Rows of the regressions.

    Example: for the tokens a b c d with a prompt of 1 the first row has i = 0 and a later token b
    """

    features: Float[Tensor, "rows hidden"]
    """States of the tokens i."""
    embeddings: Float[Tensor, "slots rows hidden"]
    """Embeddings of the tokens i + 1, i + 2, ..."""
    wanted: Float[Tensor, "slots rows hidden"]
    """States of the same tokens."""


@final
class RidgeSums:
    """Sums over rows, for all slots of a block."""

    def __init__(self, config: RidgeConfig, device: torch.device | None = None) -> None:
        hidden, slots = config.target.hidden_size, config.slots
        joined, more = 2 * hidden + 1, slots - 1
        self._slots, self.num_rows = slots, 0
        self.tensors = {
            name: torch.zeros(*shape, dtype=torch.float64, device=device)
            for name, shape in {
                "inputs": (joined, joined),
                "targets": (slots, joined, hidden),
                "crossed": (more, joined, hidden),
                "moves": (more, hidden, hidden),
                "moved": (more, hidden, hidden),
            }.items()
        }

    def add(self, rows: BlockRows) -> None:
        """Add rows."""
        ones = rows.features.new_ones(len(rows.features), 1)
        inputs = torch.cat((rows.features, rows.embeddings[0], ones), 1)
        before, sums = rows.embeddings[1:], self.tensors
        sums["inputs"] += inputs.T @ inputs
        sums["targets"] += inputs.T @ rows.wanted
        sums["crossed"] += inputs.T @ before
        sums["moves"] += before.mT @ before
        sums["moved"] += before.mT @ rows.wanted[1:]
        self.num_rows += len(inputs)

    def restore(self, num_rows: int, tensors: Mapping[str, Tensor]) -> None:
        """Continue from saved sums; CheckpointError if they are of another shape."""
        for name, own in self.tensors.items():
            if name not in tensors or tensors[name].shape != own.shape:
                raise CheckpointError(f"state of another drafter: {name} is missing or misshapen")
            own.copy_(tensors[name])
        self.num_rows = num_rows

    def solve(self) -> dict[str, Float[Tensor, "..."]]:
        """Return the parameters of a `RidgeLayer`, in float64.

        Inputs are first scaled to a mean square of 1, so that their units do not matter. One
        factorisation serves all slots: a slot's own input is eliminated by its Schur complement.
        """
        sums, count = self.tensors, max(self.num_rows, 1)
        scale = _scale(sums["inputs"].diagonal(), count)
        gram = sums["inputs"] * scale[:, None] * scale
        gram.diagonal().add_(RIDGE)
        factor = torch.linalg.cholesky(gram)
        moves = torch.stack([_scale(each.diagonal(), count) for each in sums["moves"]])
        crossed = sums["crossed"] * scale[:, None] * moves[:, None]
        known = torch.cat((*(sums["targets"] * scale[:, None]), *crossed), 1)
        parts = torch.split(torch.cholesky_solve(known, factor), crossed.shape[2], 1)
        plain, through = parts[: self._slots], parts[self._slots :]
        weights, solved = [plain[0]], {}
        for slot in range(1, self._slots):
            cross, by = crossed[slot - 1], moves[slot - 1]
            own = sums["moves"][slot - 1] * by[:, None] * by - cross.T @ through[slot - 1]
            own.diagonal().add_(RIDGE)
            wanted = sums["moved"][slot - 1] * by[:, None] - cross.T @ plain[slot]
            move = torch.linalg.solve(own, wanted)
            solved[f"transitions.{slot - 1}.weight"] = (move * by[:, None]).T
            weights.append(plain[slot] - through[slot - 1] @ move)
        joined = torch.cat([each * scale[:, None] for each in weights], 1).T
        return {"streams.weight": joined[:, :-1], "streams.bias": joined[:, -1], **solved}


def block_rows(
    states: Float[Tensor, "tokens hidden"],
    embeddings: Float[Tensor, "tokens hidden"],
    begins: Int[Tensor, "rows"],
    lasts: Int[Tensor, "rows"],
    slots: int,
) -> BlockRows:
    """Return the rows that begin at tokens `begins`, in texts whose last tokens are `lasts`."""
    after = torch.arange(1, slots + 1, device=begins.device)[:, None]
    places = torch.minimum(begins + after, lasts)
    return BlockRows(features=states[begins], embeddings=embeddings[places], wanted=states[places])


def _scale(sums: Float[Tensor, "inputs"], count: int) -> Float[Tensor, "inputs"]:
    """Return the factors that give inputs a mean square of 1."""
    return (sums / count).clamp_min(torch.finfo(torch.float32).tiny).rsqrt()


@final
class RidgeTrainer:
    """Collects sums over texts; never writes the target. `layer` has the weights of all so far."""

    head = None
    """A ridge drafter has the target's head."""

    def __init__(
        self,
        layer: RidgeLayer,
        target: Transformer,
        *,
        draft_ids: Int[Tensor, "draft"] | None = None,
    ) -> None:
        self._layer, self._target, self.draft_ids = layer, target, draft_ids
        self._reader = TargetReader(target, layer.dtype, layer.config.taps, None)
        self._sums = RidgeSums(layer.config, target.device)
        self.steps, self._num_solved = 0, 0

    @property
    def layer(self) -> RidgeLayer:
        """The drafter, with the weights that follow from the sums."""
        if self._num_solved != self._sums.num_rows:
            self._layer.load_state_dict(self._sums.solve())
            self._num_solved = self._sums.num_rows
        return self._layer

    @torch.no_grad()
    def step(self, batch: Sequence[PackedSequences]) -> TrainerReport:
        """Add the sums of a batch; DataError if it has no token to learn."""
        before = self._sums.num_rows
        for packed in batch:
            here = moved(packed, self._target.device)
            pairs = Pairs.of(here)
            begins = pairs.rows[pairs.trained]
            states = self._reader.states(here)
            ends = torch.tensor(here.cu_seqlens[1:], device=begins.device)
            lasts = ends[here.sequence[begins]] - 1
            embeddings = self._target.embedding(here.tokens).to(states)
            self._sums.add(block_rows(states, embeddings, begins, lasts, self._layer.config.slots))
        if self._sums.num_rows == before:
            raise DataError("no text of the batch can be drafted: give longer texts")
        self.steps += 1
        return TrainerReport(
            loss=0.0,
            depths=DepthReport(agreement=(), overlap=(), cross_entropy=()),
            grad_norm=0.0,
            learning_rate=0.0,
            num_tokens=sum(packed.num_tokens for packed in batch),
            num_trained=self._sums.num_rows - before,
        )

    @torch.no_grad()
    def evaluate(self, batch: Sequence[PackedSequences], num_depths: int) -> DepthReport:
        """Measure on texts: each slot, given the tokens before it in the text."""
        layer, num_depths = self.layer, min(num_depths, self._layer.config.slots)
        counts, scores = [0] * num_depths, torch.zeros(3, num_depths, dtype=torch.float64)
        for packed in batch:
            here = moved(packed, self._target.device)
            pairs = Pairs.of(here)
            states = self._reader.read(here, pairs)
            block = layer.block(states.features, states.embeddings)
            rows = pairs.trained.nonzero()[:, 0]
            scored = torch.stack(
                [
                    layer.move(block[(rows - k).clamp(min=0), k], k + 1, states.embeddings[rows])
                    for k in range(num_depths)
                ]
            )
            teacher = Teacher(
                hidden=states.after[rows],
                head=self._target.head.weight.detach(),
                draft_ids=self.draft_ids,
            )
            exist = torch.stack([pairs.exist(k)[rows] for k in range(num_depths)])
            found = score_rows(scored, teacher)
            own = torch.stack((found.agreement, found.overlap, found.cross_entropy))
            scores += (own * exist).sum(-1, dtype=torch.float64).cpu()
            counts = [a + int(b) for a, b in zip(counts, exist.sum(1), strict=True)]
        reached = counts.index(0) if 0 in counts else num_depths
        return DepthReport.of(scores[:, :reached], counts[:reached])

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums."""
        return {**self._sums.tensors, "num_rows": torch.tensor(self._sums.num_rows)}

    def restore(self, steps: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the sums after `steps` steps; CheckpointError if of another drafter."""
        self._sums.restore(int(tensors["num_rows"]), tensors)
        self.steps = steps
