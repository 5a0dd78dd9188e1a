"""A place to train in: a tiny model, prompts and the words of a command line, all on disk."""

import contextlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longtail.cli import main as cli
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer, Recipe
from longtail.drafter.formats.checkpoint import LoadedDrafter, TrainingRecord, identity
from longtail.model.hf.model import load_model, save_model
from longtail.model.hf.tokenizer import load_tokenizer
from support.metric_names import is_described
from support.tiny_models import tiny_model, tiny_tokenizer

EXACT = ("--rollout.dtype=float64", "--learner.dtype=float64", "--run.checkpoint_every=1")
"""Words of a run whose texts no order of additions changes, with a checkpoint of every step."""
PLAIN = "--speculation.drafter=none"
"""Word of a run that measures no costs of drafts, which would take most of its time."""
CLOCKED = (
    *("timing_s/", "rollout/tokens_per_s", "rollout/tail_idle", "rollout/bookkeeping"),
    "speculation/",
    "cluster/",
    "drafter/",
)
"""Metrics that come from a clock, as what tuners decide; every other number is determined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """A directory with `model/`, `tied/` (one of tied embeddings) and `prompts.jsonl`.

    Example: workshop.train("a", "--run.steps=3").code == 0; workshop.metrics("a")[2]["step"] == 3
    """

    path: Path
    common: tuple[str, ...] = ()
    """Further words of all runs."""

    @property
    def model(self) -> Path:
        """The initial policy, a Hugging Face directory."""
        return self.path / "model"

    @property
    def prompts(self) -> Path:
        """Twelve short prompts."""
        return self.path / "prompts.jsonl"

    def words(self, run: str, *more: str) -> list[str]:
        """Words of a small, quick run; later ones win."""
        return [
            "train", f"--run.dir={self.path / run}", f"--model.path={self.model}",
            f"--data.source={self.prompts}", "--data.heldout_size=4",
            "--reward.name=end_to_end.rewards:sevens", "--rollout.prompts_per_step=4",
            "--rollout.group_size=4", "--rollout.max_tokens=16", "--rollout.dtype=float32",
            "--learner.autocast=false", "--learner.learning_rate=0.02", "--run.threads=1",
            "--run.device=cpu", *self.common, *more,
        ]  # fmt: skip

    def train(self, run: str, *more: str) -> Said:
        """Run `longtail train` in this process."""
        return say(*self.words(run, *more))

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl; each metric is described in docs/metrics.md."""
        rows = read_lines(self.path / run / "metrics.jsonl")
        unknown = {name for row in rows for name in row if not is_described(name)} - {"step"}
        assert not unknown, "docs/metrics.md describes every metric"
        return rows

    def rollouts(self, run: str) -> list[dict[str, Any]]:
        """Lines of rollouts.jsonl."""
        return read_lines(self.path / run / "rollouts.jsonl")

    def texts(self, run: str) -> dict[tuple[int, str], object]:
        """Everything of the rollouts that no rounding can reach."""
        rows = self.rollouts(run)
        found = {
            (row["step"], row["request_id"]): (row["text"], row["reward"], row["policy_version"])
            for row in rows
        }
        assert len(found) == len(rows), "nothing is counted twice"
        return found

    def summary(self, run: str) -> dict[str, Any]:
        """The summary."""
        return json.loads((self.path / run / "summary.json").read_text())

    def policy(self, run: str, step: int) -> Path:
        """The policy of a checkpoint."""
        return self.path / run / "checkpoints" / f"step_{step:06d}" / "policy"

    def drafter(self, run: str, step: int) -> bytes | None:
        """The drafter of a checkpoint with the sums that it follows from; None without one."""
        path = self.path / run / "drafter" / f"step_{step:06d}" / "tensors.safetensors"
        return path.read_bytes() if path.exists() else None

    def steps_saved(self, run: str) -> list[int]:
        """Steps of the checkpoints on disk, in order."""
        found = (self.path / run / "checkpoints").glob("step_*")
        return sorted(int(path.name.removeprefix("step_")) for path in found)

    def outcome(self, run: str, step: int) -> dict[str, Any]:
        """Everything of a run that must not depend on when it was interrupted, to the last bit."""
        checkpoint = self.path / run / "checkpoints" / f"step_{step:06d}"
        state = json.loads((checkpoint / "state.json").read_text())["state"]
        if state["base"] is not None:
            del state["base"]["directory"]  # of this workshop
        return {
            "metrics": [unclocked(row) for row in self.metrics(run)],
            "rollouts": (self.path / run / "rollouts.jsonl").read_bytes(),
            "weights": [each.read_bytes() for each in checkpoint.glob("policy/*.safetensors")],
            "optimizer": (checkpoint / "trainer.safetensors").read_bytes(),
            "drafter": self.drafter(run, step),
            "state": {name: state[name] for name in state if name != "seconds"},
            "summary": {
                name: self.summary(run)[name] for name in ("reward_before", "reward_after")
            },
        }


UNTAUGHT = TrainingRecord(steps=0, tokens=0, unroll_steps=2)


def save_untaught(
    model: Path, place: Path, recipe: Recipe = "eagle1", record: TrainingRecord = UNTAUGHT
) -> Path:
    """Write an EAGLE drafter of a model that was never trained, whatever its record claims."""
    target, tokenizer = load_model(model), load_tokenizer(model)
    layers, window = ((), 8) if recipe == "eagle1" else ((0, 1), 16)
    config = EagleConfig(recipe=recipe, target=target.config, layers=layers, window=window)
    layer = EagleLayer(config)
    layer.initialize(torch.Generator().manual_seed(1))
    LoadedDrafter(
        layer=layer,
        draft_ids=None,
        trained_on=identity("elsewhere", target, tokenizer),
        training=record,
    ).save(place)
    return place


def build(path: Path, *common: str) -> Workshop:
    """Put models, their tokenizer and prompts into a directory."""
    workshop = Workshop(path=path, common=common)
    tokenizer = tiny_tokenizer()
    for model, place in ((tiny_model(), workshop.model), (tiny_model("qwen2"), path / "tied")):
        save_model(model, place, eos_ids=tokenizer.eos_ids)
        tokenizer.save(place)
    write_lines(workshop.prompts, *({"prompt": f"say {i}", "answer": str(i)} for i in range(12)))
    return workshop


def say(*words: str) -> Said:
    """Run a command line in this process and keep what it says."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words)
    return Said(code=code, out=out.getvalue(), err=err.getvalue())


def unclocked(row: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a clock measured."""
    return {name: value for name, value in row.items() if not name.startswith(CLOCKED)}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, *rows: Mapping[str, Any]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
