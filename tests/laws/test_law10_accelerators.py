"""Law 10: accelerators are optional; a run without drafter, tuner and spot training is the same.

Whole runs in float64, where no token depends on its batch: every text, reward, loss and weight of a
run that drafts, teaches its drafter and swaps it is that of the run that does not.
"""

import math
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest

from end_to_end.workshop import Workshop, build, read_lines, save_untaught, write_lines
from longtail.drafter.training.replica_gain import DrafterGain, Replica, SpotReport
from longtail.drafter.training.spot import SpotTrainer

WORDS = (
    *("--run.steps=2", "--data.shuffle=false", "--data.heldout_size=0", "--learner.kl_coef=0.1"),
    *("--rollout.prompts_per_step=8", "--rollout.group_size=2", "--rollout.max_tokens=12"),
    *("--rollout.dtype=float64", "--learner.dtype=float64"),
)


ROUNDED = "training/rollout_"
"""Metrics of rollout logprobs against the learner's; batches differ, so the last bit may, too."""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """With questions of which the drafter never learns 3, 9 and 13: it is measured on them."""
    shop = build(tmp_path_factory.mktemp("accelerators"))
    write_lines(shop.path / "questions.jsonl", *({"prompt": f"say {i}"} for i in range(16)))
    return shop


def outcome(shop: Workshop, run: str, drafter: str, *words: str) -> dict[str, Any]:
    """Everything of a run but what a clock or a drafter has measured."""
    source = f"--data.source={shop.path / 'questions.jsonl'}"
    said = shop.train(run, source, *WORDS, f"--speculation.drafter={drafter}", *words)
    assert said.code == 0, said.err
    found = shop.outcome(run, 2)
    del found["drafter"]
    for row in found["metrics"]:
        rounded = [row.pop(name) for name in list(row) if name.startswith(ROUNDED)]
        assert rounded == pytest.approx([round(value) for value in rounded], abs=1e-12)
    found["rollouts"] = [{**row, "logprob": round(row["logprob"], 9)} for row in shop.rollouts(run)]
    assert len(found["rollouts"]) == 2 * 8 * 2
    return found


def train_a_few(
    self: SpotTrainer, buffer: Any, stopped: Any, train: Callable[..., SpotReport]
) -> SpotReport:
    """Train until the second measurement."""
    measured, measure = [], SpotTrainer._measure

    def counted(*args: Any) -> Replica:
        measured.append(measure(self, *args))
        return measured[-1]

    self._measure = counted  # type: ignore[method-assign]
    return train(self, buffer, lambda: len(measured) == 2)


@pytest.mark.slow
def test_a_run_with_accelerators_is_the_run_without_them_bit_for_bit(shop, monkeypatch):
    # A lesson of two measurements after each rollout, whatever the clock says.
    monkeypatch.setattr(DrafterGain, "share_s", lambda *_: math.inf)
    monkeypatch.setattr(SpotTrainer, "train", partialmethod(train_a_few, train=SpotTrainer.train))
    fixed = ("--speculation.tuner=fixed", "--speculation.depth=3")
    drafter = save_untaught(shop.model, shop.path / "drafter", "eagle3")
    plain = outcome(shop, "plain", "none")
    assert outcome(shop, "trained", f"{drafter}+history", *fixed) == plain
    # The guard may pause drafting for the second step.
    assert any(row["speculation/nodes_per_step"] for row in shop.metrics("trained"))
    decisions = [row["what"] for row in read_lines(shop.path / "trained" / "drafter.jsonl")]
    assert decisions == ["trained", "offered", "published"] * 2
