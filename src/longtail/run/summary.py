"""Summary of a finished run: rewards, costs and files, in summary.json and on the terminal."""

import contextlib
import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from longtail.errors import SPACE
from longtail.run.checkpoint import Checkpoint
from longtail.run.metrics_log import Number, is_row, read_line
from longtail.system.files import parse_json, write_atomically, writing

_log = logging.getLogger("longtail")

FILE = "summary.json"
PARTS = ("rollout", "reward", "learn")
"""Parts of a step that the summary lists; the rest is `other`."""
_SHOWN_LENGTHS = 12
_LINES = (
    ("held-out reward", "{reward_before:.3f} before, {reward_after:.3f} after {steps} steps"),
    ("time", "{seconds:.0f} s"),
    ("rollout speed", "{tokens_per_s:,.0f} tokens/s"),
    (
        "time of a step",
        "rollout {rollout_share:.0%}, reward {reward_share:.0%}, learn {learn_share:.0%}, "
        "other {other_share:.0%}",
    ),
    ("lost to the tail", "{tail_idle_share:.0%} of the rollout's slots were empty"),
    (
        "lengths",
        "median {length_p50:.0f} tokens, longest {length_max:.0f}; the longest of a step is "
        "{max_over_median:.0f}x its median",
    ),
    (
        "speculation",
        "{accept_length:.2f} tokens per verify step; verify steps produced {emitted_share:.0%} of "
        "all tokens",
    ),
    ("tuner", "{num_switches:d} switches, {tuner_share:.1%} of the time"),
    (
        "idle workers",
        "did other work for {idle_utilization:.0%} of the time without a text to write",
    ),
)

Row = Mapping[str, Number | None]
"""One step of metrics.jsonl."""
Summary = dict[str, Any]
"""Numbers of a run; a number that was not measured is None.

Example: {"reward_before": 0.41, "reward_after": 0.72, "seconds": 251.0, "steps": 30, ...}
"""


def summarize_run(
    rows: Sequence[Row],
    *,
    steps: int,
    reward_after: float | None,
    seconds: float,
    limit: str = "",
) -> Summary:
    """Return the summary of the rows of metrics.jsonl, the first of which has `reward_before`.

    `limit` says what drafts can gain on the machine.
    Lengths, shares of drafts and of idle time are medians over the steps, the others are weighted
    by time.
    """

    def known(name: str) -> list[Number]:
        return [value for row in rows if (value := row.get(name)) is not None]

    def middle(name: str) -> Number | None:
        return median(known(name)) if known(name) else None

    def per_rollout_s(name: str) -> Number:
        seconds_each = (row.get("timing_s/rollout") or 0.0 for row in rows)
        shares = zip((row.get(name) or 0.0 for row in rows), seconds_each, strict=True)
        return sum(share * each_s for share, each_s in shares) / rollout_s

    rollout_s = sum(known("timing_s/rollout")) or 1.0
    step_s = sum(known("timing_s/step")) or 1.0
    parts = {f"{part}_share": sum(known(f"timing_s/{part}")) / step_s for part in PARTS}
    switches = known("speculation/switches")
    return {
        "reward_before": rows[0].get("eval/reward_mean") if rows else None,
        "reward_after": reward_after,
        "seconds": seconds,
        "steps": steps,
        "tokens_per_s": sum(known("rollout/generated_tokens")) / rollout_s,
        **parts,
        "other_share": max(1.0 - sum(parts.values()), 0.0) if rows else 0.0,
        "tail_idle_share": per_rollout_s("rollout/tail_idle_share"),
        "length_p50": middle("response_length/p50"),
        "length_max": max(known("response_length/max"), default=None),
        "max_over_median": middle("response_length/max_over_median"),
        "accept_length": middle("speculation/accept_length"),
        "emitted_share": middle("speculation/emitted_share"),
        "limit": limit,
        "num_switches": int(sum(switches)) if switches else None,
        "tuner_share": per_rollout_s("speculation/tuner_share") if switches else None,
        "idle_utilization": (
            middle("cluster/idle_utilization") if any(known("cluster/idle_utilization")) else None
        ),
        "drafter_accept_lengths": [
            length
            for row in rows
            if row.get("drafter/version") and (length := row.get("speculation/accept_length"))
        ],
    }


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of metrics.jsonl; it is said how many lines are of another kind."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    found = [read_line(line, is_row) for line in lines]
    rows: list[Row] = [row for row in found if row is not None]
    if num_others := len(found) - len(rows):
        _log.warning("%s: %d lines are of another kind, and left out", path, num_others)
    return rows


def write_summary(run_dir: Path, summary: Summary) -> None:
    """Write summary.json. Raises CheckpointError if it cannot be written."""
    with writing("the summary", run_dir / FILE, SPACE):
        write_atomically(run_dir / FILE, json.dumps(summary, indent=1) + "\n")


def finished_summary(run_dir: Path, checkpoint: Checkpoint | None, steps: int) -> Summary | None:
    """Return the summary of a run that has completed all `steps`, else None."""
    path = run_dir / FILE
    if checkpoint is None or checkpoint.step < steps or not path.exists():
        return None
    try:
        summary: Summary = parse_json(path.read_bytes())
        return summary if summary["steps"] == checkpoint.step else None
    except (LookupError, TypeError, ValueError):  # it is made again
        return None


def summary_lines(summary: Summary, run_dir: Path) -> list[tuple[str, str]]:
    """Return labels and values for the terminal."""
    lines = []
    for label, text in _LINES:
        with contextlib.suppress(TypeError):  # a number was not measured: None has no such format
            lines.append((label, text.format(**summary)))
    if limit := summary.get("limit"):
        lines.append(("limit", limit))
    if lengths := summary["drafter_accept_lengths"]:
        every = -(-len(lengths) // _SHOWN_LENGTHS)
        shown = " ".join(f"{each:.2f}" for each in lengths[(len(lengths) - 1) % every :: every])
        command = shlex.join(["longtail", "drafter", "export", str(run_dir)])
        lines.append(("drafter", f"accept length by step: {shown}"))
        lines.append(("", f"to serve it elsewhere: {command} --out DIR"))
    policy = run_dir / "checkpoints" / f"step_{summary['steps']:06d}" / "policy"
    files = [run_dir / name for name in ("metrics.jsonl", "rollouts.jsonl", FILE, "report.html")]
    return [*lines, ("policy", str(policy)), *((path.stem, str(path)) for path in files)]
