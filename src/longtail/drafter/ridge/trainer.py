"""Trains a ridge drafter on packed sequences, and converts one to an EAGLE-1 layer."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.drafter.eagle.loss import Teacher, score_rows
from longtail.drafter.eagle.target_states import TargetReader
from longtail.drafter.eagle.unroll import Pairs
from longtail.drafter.kind import DepthReport, TrainerReport
from longtail.drafter.ridge.layer import RidgeLayer
from longtail.drafter.ridge.sums import SequenceSums
from longtail.drafter.weights import load_parameters
from longtail.errors import DataError
from longtail.model.transformer import Transformer
from longtail.rl.packing import moved
from longtail.speculation.drafter import Observed
from longtail.types import PackedSequences


@final
class RidgeTrainer:
    """Collects sums over sequences; never writes the target. `layer` has the weights of all so far.

    Its draft vocabulary is what the sequences write, and `draft_ids`.
    """

    head = None
    """A ridge drafter has the target's head."""

    def __init__(
        self,
        layer: RidgeLayer,
        target: Transformer,
        *,
        draft_ids: Int[Tensor, "draft"] | None = None,
    ) -> None:
        self._layer, self._target = layer, target
        self._always = [] if draft_ids is None else draft_ids.tolist()
        self._reader = TargetReader(target, layer.dtype, layer.config.taps)
        self._collector = SequenceSums(target, layer.config.slots)
        self._sums, self._is_solved = self._collector.take(), True
        self.steps = 0

    @property
    def draft_ids(self) -> Int[Tensor, "draft"]:
        """The draft vocabulary of the sequences so far."""
        return self._sums.vocabulary(self._always).to(self._target.device)

    @property
    def layer(self) -> RidgeLayer:
        """The drafter, with the weights that follow from the sums."""
        if not self._is_solved:
            load_parameters(self._layer, self._sums.solve(range(self._layer.config.slots)))
            self._is_solved = True
        return self._layer

    @torch.no_grad()
    def step(self, batch: Sequence[PackedSequences]) -> TrainerReport:
        """Add the sums of a batch; DataError if it has no token to learn."""
        for number, packed in enumerate(batch):
            here = moved(packed, self._target.device)
            states, tokens = self._reader.states(here)[0], packed.tokens.tolist()
            for start, end in pairwise(packed.cu_seqlens):
                seen = Observed(
                    request_id=f"{number}/{start}",
                    tokens=tokens[start:end],
                    start=0,
                    num_tokens=end - start - 1,
                    prompt_len=packed.loss_mask[start:end].tolist().count(0.0),
                    is_finished=True,
                )
                self._collector.observe([seen], states[start : end - 1])
        sums = self._collector.take()
        if not sums.num_tokens:
            raise DataError("no sequence of the batch can be drafted: give longer sequences")
        self._sums.add(sums)
        self.steps, self._is_solved = self.steps + 1, False
        return TrainerReport(
            num_tokens=sum(packed.num_tokens for packed in batch),
            num_trained=int(sums.num_tokens),
        )

    @torch.no_grad()
    def evaluate(self, batch: Sequence[PackedSequences], num_depths: int) -> DepthReport:
        """Measure on sequences: each slot, given the tokens before it in the sequence."""
        layer, num_depths = self.layer, min(num_depths, self._layer.config.slots)
        draft_ids = self.draft_ids
        counts, overlaps = [0] * num_depths, torch.zeros(num_depths, dtype=torch.float64)
        for packed in batch:
            here = moved(packed, self._target.device)
            pairs = Pairs.of(here)
            states = self._reader.read(here, pairs)
            inputs = torch.cat((states.features, states.embeddings), 1)
            rows = pairs.trained.nonzero()[:, 0]
            before, roots = states.embeddings[rows], [rows - k for k in range(num_depths)]
            scored = torch.stack(
                [layer(k + 1, inputs[each.clamp(min=0)], before) for k, each in enumerate(roots)]
            )
            teacher = Teacher(
                hidden=states.after[rows],
                head=self._target.head.weight.detach(),
                draft_ids=draft_ids,
            )
            exist = torch.stack([pairs.exist(k)[rows] for k in range(num_depths)])
            found = score_rows(scored, teacher).overlap * exist
            overlaps += found.sum(-1, dtype=torch.float64).cpu()
            counts = [a + int(b) for a, b in zip(counts, exist.sum(1), strict=True)]
        reached = counts.index(0) if 0 in counts else num_depths
        return DepthReport.of(overlaps[:reached], counts[:reached])

    @property
    def sums(self) -> dict[str, Tensor]:
        """The sums so far."""
        return self._sums.tensors()

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums: no optimizer has moments."""
        return self.sums

    def restore(self, steps: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the sums after `steps` steps; CheckpointError if of another drafter."""
        self._sums = self._sums.restored(tensors)
        self.steps, self._is_solved = steps, False


def as_eagle(ridge: RidgeLayer) -> EagleLayer:
    """Return an EAGLE-1 layer that repeats slot 1 at every depth; nothing attends."""
    config = ridge.config
    layer = EagleLayer(
        EagleConfig(
            recipe="eagle1",
            target=config.target,
            window=0,
            draft_vocab_size=config.draft_vocab_size,
        )
    )
    layer.initialize(torch.Generator().manual_seed(0))
    layer.to(ridge.device, ridge.dtype)
    first = dict(ridge.named_parameters())["streams.0.weight"]
    state, embedding = torch.split(first, config.target.hidden_size, 1)
    with torch.no_grad():
        layer.fc.weight.copy_(torch.cat((embedding, state), 1))
        for residual in (layer.output, layer.feed_forward.down):
            residual.weight.zero_()
    return layer
