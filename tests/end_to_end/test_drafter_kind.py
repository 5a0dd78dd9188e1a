"""CONTRIBUTING's recipe for a drafter with weights: a record, and a line in `KINDS`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from end_to_end.workshop import Workshop, build, say
from longtail import Engine, SamplingParams
from longtail.assembly import drafters
from longtail.drafter.kind import (
    DepthReport,
    DraftConfig,
    DrafterKind,
    DraftLayer,
    Lessons,
    TrainerReport,
)
from longtail.drafter.kinds import KINDS
from longtail.drafter.weights import load_parameters
from longtail.speculation.drafter import NO_TAPS
from longtail.speculation.grow import Frontier, GrowingDrafter, Walker
from longtail.speculation.strategy import Strategy
from longtail.tuner.tuner import FixedTuner


@dataclass(frozen=True, slots=True, kw_only=True)
class BigramConfig(DraftConfig):
    recipe: str = "bigram"
    taps = NO_TAPS


class BigramLayer(DraftLayer):
    """Counts of the token that follows each token."""

    def __init__(self, config: BigramConfig) -> None:
        super().__init__()
        self.config, size = config, config.target.vocab_size
        self.counts = torch.nn.Parameter(torch.zeros(size, size), requires_grad=False)


class BigramDrafter(GrowingDrafter):
    taps = NO_TAPS

    def __init__(self, layer: BigramLayer, *_: Any, **__: Any) -> None:
        super().__init__()
        self.layer = layer

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        load_parameters(self.layer, weights)

    def _walker(self, requests: Sequence[Any]) -> Walker:
        return _Rows(self.layer.counts, [each.tokens[-1] for each in requests])

    def _is_observed(self, request: Any) -> bool:
        return True

    def _chains(self, *_: Any) -> None: ...
    def observe(self, *_: Any) -> None: ...
    def forget(self, request_id: str) -> None: ...
    def refresh(self) -> None: ...


class _Rows(Walker):
    def __init__(self, counts: torch.Tensor, roots: list[int]) -> None:
        self.counts, self.roots = counts, roots

    def root(self) -> torch.Tensor:
        return self.counts[self.roots]

    def descend(self, frontier: Frontier) -> torch.Tensor:
        return self.counts[frontier.tokens]


class BigramTrainer:
    draft_ids, head, sums = None, None, {}

    def __init__(self, _: Lessons, layer: BigramLayer, *__: Any) -> None:
        self.layer, self.steps = layer, 0

    def step(self, batch: Sequence[Any]) -> TrainerReport:
        for first, second in pairwise([token for each in batch for token in each.tokens.tolist()]):
            self.layer.counts[first, second] += 1
        self.steps += 1
        return TrainerReport(num_tokens=1, num_trained=1)

    def evaluate(self, *_: Any) -> DepthReport:
        return DepthReport()

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.layer.named_parameters())

    def restore(self, *_: Any) -> None: ...


BIGRAM = DrafterKind(
    config=BigramConfig,
    layer=BigramLayer,
    drafter=BigramDrafter,
    settings=(),
    num_unrolled=1,
    fresh=lambda config, lessons: (BigramLayer(config), None),
    trainer=BigramTrainer,
)


def test_a_registered_kind_is_trained_saved_read_and_drafts(tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, "bigram", BIGRAM)
    monkeypatch.setattr(drafters, "BudgetTuner", lambda: FixedTuner(Strategy(depth=3, size=3)))
    workshop: Workshop = build(tmp_path)
    said = say(
        *("drafter", "train", "--drafter.recipe=bigram", "--train.steps=4"),
        *(f"--target.path={workshop.model}", f"--data.source={workshop.prompts}"),
        *(f"--run.dir={tmp_path / 'run'}", "--run.device=cpu", "--run.threads=1"),
        *("--data.heldout_size=2", "--data.max_tokens=24", "--data.temperature=0.001"),
    )
    assert said.code == 0, said.err
    greedy = SamplingParams(temperature=0, max_tokens=40)
    texts, accepted = [], 0
    for drafter in ("none", str(tmp_path / "run")):
        engine, reports = Engine(str(workshop.model), drafter=drafter, device="cpu"), list[Any]()
        done = engine.generate(["say 1", "say 2"], greedy, on_step=reports.append)
        texts.append([each.text for each in done])
        accepted += sum(found.num_accepted for each in reports for found in each.verified)
    assert texts[0] == texts[1]
    assert accepted > 0
    refused = say("drafter", "export", str(tmp_path / "run"), f"--out={tmp_path / 'out'}")
    assert "a bigram drafter has no form for other engines" in refused.err
