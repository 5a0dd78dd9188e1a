"""Summary of a finished run: rewards, costs and files."""

import contextlib
import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import get_type_hints

from longtail.errors import CheckpointError
from longtail.run.checkpoint import Checkpoint
from longtail.run.metrics import Number
from longtail.system.files import read_json
from longtail.system.machine import pip_install

SECTIONS = ("rollout", "reward", "logprob", "update")
"""Parts of a step that the summary lists; the rest is `other`."""
FILE = "summary.json"
_SHOWN_LENGTHS = 12
_MOST = 1e300
"""Largest number taken for valid: sums of larger ones are not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Results and costs of a run; summary.json holds it.

    Example: RunSummary(reward_before=0.41, reward_after=0.72, seconds=251.0, ...)
    """

    reward_before: float | None
    """Mean reward on held-out problems under the initial policy; None without such problems."""
    reward_after: float | None
    """Mean reward on held-out problems under the final policy; None without such problems."""
    seconds: float
    """Wall time of the whole run, with start-up, evaluations and the time before a resume."""
    warm_start_s: float
    """Seconds of it until model and drafter were open; the embedded ones may be trained first."""
    steps: int
    tokens_per_s: float
    """Generated tokens per second of rollout."""
    rollout_share: float
    """Share of the steps' time, as for the next four."""
    reward_share: float
    logprob_share: float
    update_share: float
    other_share: float
    tail_idle_share: float
    """Share of the batch slots that were empty while the longest completions finished."""
    length_p50: float
    """Median over steps of the step's median completion length, tokens."""
    length_max: float
    max_over_median: float
    """Median over steps of longest / median completion."""
    accept_length: float | None = None
    """Median over steps of the tokens emitted per verify step; None if nothing was drafted."""
    emitted_share: float | None = None
    """Median over steps of the share of tokens from verify steps; None if nothing was drafted."""
    num_switches: int | None = None
    """Number of switches between drafting and plain decoding; None without speculation."""
    tuner_share: float | None = None
    """Share of the rollouts' time that the tuner took; None without speculation."""
    idle_utilization: float | None = None
    """Median over steps of the share of idle time spent on drafter training; None without it."""
    drafter_accept_lengths: tuple[float, ...] = ()
    """Expected accept length of the trained drafter after each step in which it was known."""

    def write(self, path: Path) -> None:
        """Write as JSON. Raises CheckpointError when the disk refuses."""
        temporary = path.with_name(f".new-{path.name}")
        try:
            temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            raise CheckpointError(
                f"{path}: {error.strerror}; free some space, then start again: only the summary "
                "is missing"
            ) from error

    def lines(self, run_dir: Path) -> list[tuple[str, str]]:
        """Return labels and values for the terminal."""
        before, after = _number(self.reward_before), _number(self.reward_after)
        parts = (*SECTIONS, "other")
        shares = (
            self.rollout_share,
            self.reward_share,
            self.logprob_share,
            self.update_share,
            self.other_share,
        )
        breakdown = ", ".join(f"{n} {s:.0%}" for n, s in zip(parts, shares, strict=True))
        cost = f"{self.seconds:.0f} s"
        if self.warm_start_s:
            cost += f" ({self.warm_start_s:.0f} s of it to open model and drafter)"
        return [
            ("held-out reward", f"{before} before, {after} after {self.steps} steps"),
            ("time", cost),
            ("rollout speed", f"{self.tokens_per_s:,.0f} tokens/s"),
            ("time of a step", breakdown),
            ("lost to the tail", f"{self.tail_idle_share:.0%} of the rollout's slots were empty"),
            (
                "lengths",
                f"median {self.length_p50:.0f} tokens, longest {self.length_max:.0f}; "
                f"the longest of a step is {self.max_over_median:.0f}x its median",
            ),
            *self._speculation_lines(),
            *self._drafter_lines(run_dir),
            ("policy", f"{run_dir / 'checkpoints' / f'step_{self.steps:06d}' / 'policy'}"),
            ("metrics", str(run_dir / "metrics.jsonl")),
            ("rollouts", str(run_dir / "rollouts.jsonl")),
            ("summary", str(run_dir / FILE)),
            *_report_lines(run_dir),
        ]

    def _speculation_lines(self) -> list[tuple[str, str]]:
        parts = []
        if self.accept_length is not None and self.emitted_share is not None:
            parts.append(
                f"{self.accept_length:.2f} tokens per verify step; verify steps produced "
                f"{self.emitted_share:.0%} of all tokens"
            )
        if self.num_switches is not None and self.tuner_share is not None:
            plural = "" if self.num_switches == 1 else "es"
            parts.append(
                f"{self.num_switches} switch{plural}, tuner {self.tuner_share:.1%} of the time"
            )
        lines = [("speculation", "; ".join(parts))] if parts else []
        if self.idle_utilization is not None:
            text = f"trained the drafter for {self.idle_utilization:.0%} of their idle time"
            lines.append(("idle workers", text))
        return lines

    def _drafter_lines(self, run_dir: Path) -> list[tuple[str, str]]:
        if not self.drafter_accept_lengths:
            return []
        lengths = _spread(self.drafter_accept_lengths, _SHOWN_LENGTHS)
        shown = " ".join(f"{length:.2f}" for length in lengths)
        command = shlex.join(["longtail", "drafter", "export", str(run_dir), "--to", "vllm"])
        return [
            ("drafter", f"expected accept length by step: {shown}"),
            ("", f"to serve it elsewhere: {command} --out DIR"),
        ]


def _spread(values: Sequence[float], most: int) -> list[float]:
    """Return at most `most` values, evenly spread, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def finished_summary(run_dir: Path, checkpoint: Checkpoint | None, steps: int) -> RunSummary | None:
    """Return the summary of a run that has completed all `steps`, else None."""
    if checkpoint is None or checkpoint.step < steps:
        return None
    try:
        summary = read_summary(run_dir / FILE)
    except (OSError, ValueError):  # missing or damaged: it is written again
        return None
    return summary if summary.steps == checkpoint.step else None


def read_summary(path: Path) -> RunSummary:
    """Read a summary. Raises OSError if it cannot be read, ValueError if it is no summary."""
    written = read_json(path)
    kinds = get_type_hints(RunSummary)
    if not isinstance(written, dict) or written.keys() != kinds.keys():
        raise ValueError("not a summary")
    lengths = written.pop("drafter_accept_lengths")
    if not (isinstance(lengths, list) and all(map(is_number, lengths))):
        raise ValueError("drafter_accept_lengths are no numbers")
    for name, value in written.items():
        if not (is_number(value) or (value is None and kinds[name] not in (int, float))):
            raise ValueError(f"{name} is no number")
    return RunSummary(**written, drafter_accept_lengths=tuple(lengths))


def read_metrics(path: Path) -> list[dict[str, Number | None]]:
    """Read metrics.jsonl, one row per step.

    Torn and damaged lines, and values that are neither number nor null, are left out. Raises
    CheckpointError if the file cannot be read.
    """
    rows: list[dict[str, Number | None]] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}; restore it from a copy, then start again: only the "
            "summary is missing"
        ) from error
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and is_number(row.get("step")):
                rows.append({n: v for n, v in row.items() if v is None or is_number(v)})
    return rows


def is_number(value: object) -> bool:
    """Return whether a JSON value is a finite number."""
    return isinstance(value, int | float) and -_MOST < value < _MOST


def summarize_run(
    rows: Sequence[Mapping[str, Number | None]],
    *,
    steps: int,
    reward_after: float | None,
    seconds: float,
    warm_start_s: float,
) -> RunSummary:
    """Return the summary of the rows of metrics.jsonl, the first of which has `reward_before`."""

    def values(name: str) -> list[float]:
        return [row.get(name) or 0.0 for row in rows]

    def known(name: str) -> list[float]:
        return [value for row in rows if (value := row.get(name)) is not None]

    def total(name: str) -> float:
        return math.fsum(values(name))

    def median(name: str) -> float:
        return statistics.median(values(name) or [0.0])

    def known_median(name: str) -> float | None:
        return statistics.median(known(name)) if known(name) else None

    whole, rollout = total("timing_s/step"), total("timing_s/rollout")
    shares = {name: total(f"timing_s/{name}") / whole if whole else 0.0 for name in SECTIONS}
    seconds_each = values("timing_s/rollout")

    def rollout_mean(name: str) -> float:
        parts = zip(values(name), seconds_each, strict=True)
        return sum(share * s for share, s in parts) / rollout if rollout else 0.0

    switches = known("speculation/switches")
    return RunSummary(
        reward_before=rows[0].get("eval/reward_mean") if rows else None,
        reward_after=reward_after,
        seconds=seconds,
        warm_start_s=warm_start_s,
        steps=steps,
        tokens_per_s=total("rollout/generated_tokens") / rollout if rollout else 0.0,
        rollout_share=shares["rollout"],
        reward_share=shares["reward"],
        logprob_share=shares["logprob"],
        update_share=shares["update"],
        # Workers learn in parallel, so their seconds may exceed the wall time.
        other_share=max(1.0 - sum(shares.values()), 0.0) if whole else 0.0,
        tail_idle_share=rollout_mean("rollout/tail_idle_share"),
        length_p50=median("response_length/p50"),
        length_max=max(values("response_length/max"), default=0.0),
        max_over_median=median("response_length/max_over_median"),
        accept_length=known_median("speculation/accept_length"),
        emitted_share=known_median("speculation/emitted_share"),
        num_switches=int(sum(switches)) if switches else None,
        tuner_share=rollout_mean("speculation/tuner_share") if switches else None,
        idle_utilization=median("cluster/idle_utilization") if total("cluster/spot_s") else None,
        drafter_accept_lengths=tuple(known("drafter/expected_accept_length")),
    )


def _report_lines(run_dir: Path) -> list[tuple[str, str]]:
    """Return the report's path, or the command that writes the report of a speculating run."""
    if (run_dir / "report.html").exists():
        return [("report", str(run_dir / "report.html"))]
    if not (run_dir / "speculation.jsonl").exists():
        return []
    command = shlex.join(["longtail", "report", str(run_dir)])
    if find_spec("matplotlib") is None:
        command = f"{pip_install('plots')} && {command}"
    return [("report", f"not written; run: {command}")]


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"
