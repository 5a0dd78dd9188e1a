"""`longtail bench trl`: TRL's GRPO alone against TRL with longtail, with and without a drafter.

    arm     generates with                                     steps
    trl     transformers, TRL's own                            the first --trl-steps
    none    longtail, plain decoding                           --steps
    auto    longtail, a drafter that begins fresh and learns   --steps

The arms are processes that take turns, step by step, so a change of the machine's speed meets all
of them. Prompts, batch, reward and optimizer are the same.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import longtail
from longtail.assembly.engine import model_directory
from longtail.bench.common.card import Table, print_card
from longtail.bench.common.peers import PeerProcess
from longtail.bench.common.timing import progress
from longtail.bench.options import TrlBenchOptions
from longtail.rl.data.sources import load_rows

_WORKER = Path(__file__).with_name("trl_worker.py")
TRL, NONE, AUTO = "trl", "none", "auto"
_LATE = 10
"""Step from which a fresh drafter is compared with none."""


@dataclass(slots=True)
class Arm:
    """The steps of one arm."""

    name: str
    steps: list[dict[str, Any]] = field(default_factory=list)

    def seconds(self, part: str, count: int | None = None, first: int = 0) -> float:
        """Return the median seconds of a part of the steps from `first` on."""
        return median(step[part] for step in self.steps[first:count])


def run(options: TrlBenchOptions) -> int:
    """Run all arms, print the card, and end with one JSON line; return 1 if texts differ."""
    log = progress("trl")
    names = [*([TRL] if options.trl_steps else []), NONE, AUTO]
    arms = {name: Arm(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="longtail-trl-") as place, ExitStack() as stack:
        job = _job(options, Path(place))
        processes = {}
        for name in names:
            log(f"starting {name}")
            spec = {**job, "arm": name, "out": str(Path(place) / name)}
            python = options.peer_python or sys.executable
            peer = PeerProcess(python, _WORKER, "TRL", spec, flag="--peer-python")
            processes[name] = stack.enter_context(peer)
        for number in range(options.steps):
            for name, process in processes.items():
                if name == TRL and number >= options.trl_steps:
                    continue
                step = process.ask({"step": number + 1})
                arms[name].steps.append(step)
                log(
                    f"step {number + 1} {name}: generation {step['gen_s']:.2f} s of "
                    f"{step['step_s']:.2f} s, {step['tokens']} tokens"
                )
    shown = {key: value for key, value in asdict(options).items() if key != "json"}
    result = {"bench": "trl", **shown, **compare(arms)}
    print_card([_table(list(arms.values()))], result, json_only=options.json)
    return 0 if result["differing_share"] == 0 else 1


def compare(arms: Mapping[str, Arm]) -> dict[str, Any]:
    """Return the figures of the JSON line.

    Ratios are medians over the steps that both arms made, above 1 where longtail with its drafter
    is faster.
    """
    auto, plain, alone = arms[AUTO], arms[NONE], arms.get(TRL)
    pairs = [
        (a, b)
        for one, two in zip(auto.steps, plain.steps, strict=True)
        for a, b in zip(one["texts"], two["texts"], strict=True)
    ]
    gaps = [step["logprob_gap"] for arm in (auto, plain) for step in arm.steps]
    first = min(_LATE - 1, len(auto.steps) - 1)
    found: dict[str, Any] = {
        "differing_share": sum(a != b for a, b in pairs) / len(pairs),
        "logprob_gap": max(gaps),
        "drafter_ratio": plain.seconds("gen_s", first=first) / auto.seconds("gen_s", first=first),
        "arms": {name: [_without_texts(step) for step in arm.steps] for name, arm in arms.items()},
    }
    if alone is None:
        return found
    count = len(alone.steps)
    for name, part in (("generation", "gen_s"), ("step", "step_s")):
        theirs = alone.seconds(part, count)
        found[f"{name}_ratio"] = theirs / auto.seconds(part, count)
        found[f"{name}_ratio_none"] = theirs / plain.seconds(part, count)
    found["tokens_ratio"] = sum(step["tokens"] for step in alone.steps) / sum(
        step["tokens"] for step in auto.steps[:count]
    )
    return found


def _without_texts(step: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in step.items() if key != "texts"}


def _job(options: TrlBenchOptions, place: Path) -> dict[str, Any]:
    """Return the job of all arms; the prompts are in a file."""
    size = options.steps * options.completions // options.group
    found = load_rows(options.prompts, size, options.seed, field="--prompts")
    rows = [{"prompt": _messages(row["prompt"])} for row in found]
    (place / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    names = ("completions", "group", "micro_batch", "max_tokens", "steps", "dtype", "learning_rate")
    return {
        **{name: getattr(options, name) for name in (*names, "seed", "threads")},
        "model": str(model_directory(options.model, field="--model")),
        "rows": str(place / "rows.json"),
        "sources": str(Path(longtail.__file__).parents[1]),
    }


def _messages(prompt: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _table(arms: Sequence[Arm]) -> Table:
    columns = {
        "arm": lambda arm: arm.name,
        "steps": lambda arm: len(arm.steps),
        "generation s": lambda arm: arm.seconds("gen_s"),
        "step s": lambda arm: arm.seconds("step_s"),
        "last generation s": lambda arm: arm.steps[-1]["gen_s"],
        "accept length": lambda arm: arm.steps[-1]["metrics"]["rollout/spec_accept_length"],
        "tokens a step": lambda arm: median(step["tokens"] for step in arm.steps),
    }
    return Table("TRL's GRPO alone and with longtail (medians)", columns, arms)
