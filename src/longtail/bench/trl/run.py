"""`longtail bench trl`: TRL's GRPO alone against TRL with longtail, with and without a drafter.

    arm     generates with                                     steps
    trl     transformers, TRL's own                            the first --trl-steps
    none    longtail, plain decoding                           --steps
    auto    longtail, a drafter that begins fresh and learns   --steps

The arms are processes that take turns, step by step, so a change of the machine's speed meets all
of them. Prompts, batch, reward and optimizer are the same.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, final

import longtail
from longtail.assembly.models import model_directory
from longtail.bench.common.card import Table, print_card
from longtail.bench.common.options import settings
from longtail.bench.common.process import progress
from longtail.bench.trl.options import TrlBenchOptions
from longtail.errors import ConfigError, LongtailError
from longtail.rl.data.tiny_task import problems

_WORKER = Path(__file__).with_name("worker.py")
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


@final
class _Process:
    """One arm in its process."""

    def __init__(self, python: str, job: Mapping[str, Any], log: Path) -> None:
        self._log = log
        try:
            self._process = subprocess.Popen(
                [python, str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log.open("w"),
                text=True,
                env=None,
            )
        except OSError as error:
            raise ConfigError(
                f"--peer-python = {python!r}: it cannot be run ({error}); name the python of an "
                "environment with TRL"
            ) from error
        self._send(json.dumps(dict(job)))

    def step(self) -> dict[str, Any]:
        """Make one step and return its report."""
        self._send("step")
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = "\n".join(self._log.read_text().splitlines()[-15:])
            raise LongtailError(f"TRL ended before its step was done:\n{last}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


def run(options: TrlBenchOptions) -> int:
    """Run all arms, print the card, and end with one JSON line."""
    _check(options)
    log = progress("trl")
    directory = str(model_directory(options.model, field="--model"))
    with tempfile.TemporaryDirectory() as place:
        processes = {
            name: _Process(
                options.peer_python or sys.executable,
                _job(options, name, directory, Path(place) / name),
                Path(place) / f"{name}.log",
            )
            for name in ([TRL] if options.trl_steps else []) + [NONE, AUTO]
        }
        arms = {name: Arm(name) for name in processes}
        try:
            for number in range(options.steps):
                for name, process in processes.items():
                    if name == TRL and number >= options.trl_steps:
                        process.close()
                        continue
                    step = process.step()
                    arms[name].steps.append(step)
                    log(
                        f"step {number + 1} {name}: generation {step['gen_s']:.2f} s of "
                        f"{step['step_s']:.2f} s, {step['tokens']} tokens"
                    )
        finally:
            for process in processes.values():
                process.close()
    result = {"bench": "trl", **settings(options), **compare(arms)}
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
        "arms": {name: arm.steps for name, arm in arms.items()},
    }
    for each in found["arms"].values():
        for step in each:
            step.pop("texts", None)
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


def _check(options: TrlBenchOptions) -> None:
    if options.completions % options.group or options.completions % options.micro_batch:
        raise ConfigError(
            f"--completions = {options.completions}: it must be a multiple of --group = "
            f"{options.group} and of --micro-batch = {options.micro_batch}"
        )


def _job(options: TrlBenchOptions, arm: str, directory: str, out: Path) -> dict[str, Any]:
    rows = problems(options.steps * options.completions, seed=options.seed, split="train")
    return {
        **settings(options),
        "arm": arm,
        "model": directory,
        "rows": [{"prompt": row["prompt"]} for row in rows],
        "out": str(out),
        "sources": str(Path(longtail.__file__).parents[1]),
    }


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
