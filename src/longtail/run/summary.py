"""The card at the end of a run: what it reached, what it cost, where the files are."""

import contextlib
import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path

from longtail.errors import CheckpointError
from longtail.run.checkpoint import Checkpoint
from longtail.run.metrics import Number
from longtail.system.files import read_json
from longtail.system.machine import pip_install

SECTIONS = ("rollout", "reward", "logprob", "update")
"""Parts of a step that the card tells apart; the rest is `other`."""
_MOST = 1e300
"""Numbers beyond it are damage: sums of them would not be finite."""
_MAY_LACK = ("reward_before", "reward_after")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A run in a dozen numbers; written as card.json.

    Example: Card(reward_before=0.41, reward_after=0.72, seconds=251.0, rollout_share=0.71, ...)
    """

    reward_before: float | None
    """Mean reward on held-out problems under the initial policy; None without held-out ones."""
    reward_after: float | None
    seconds: float
    """Wall time of the whole run, start-up, evaluations and earlier sittings included."""
    warm_start_s: float
    """Of them, making the embedded model and its drafter; 0 when they were cached."""
    steps: int
    tokens_per_s: float
    """Generated tokens over rollout seconds."""
    rollout_share: float
    reward_share: float
    logprob_share: float
    update_share: float
    other_share: float
    tail_idle_share: float
    """Share of the generating worker's places that stood empty while the longest went on."""
    length_p50: float
    """Median over steps of the step's median completion length, tokens."""
    length_max: float
    max_over_median: float
    """Median over steps of longest / median completion."""
    accept_length: float | None = None
    """Median over steps of tokens emitted a verify step; None where nothing was drafted."""
    emitted_share: float | None = None
    """Median over steps of the share of tokens that came of verify steps."""
    num_switches: int | None = None
    """Changes between drafting and plain decoding, of all steps; None without speculation."""
    tuner_share: float | None = None
    """Share of the rollouts' time that deciding took."""
    idle_utilization: float | None = None
    """Median over steps of the idle workers' time in which they trained the drafter; None where
    nobody did."""

    def write(self, path: Path) -> None:
        """Write as JSON. Raises CheckpointError when the disk refuses."""
        temporary = path.with_name(f".new-{path.name}")
        try:
            temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            raise CheckpointError(
                f"{path}: {error.strerror}; free some space, then start again: only the card is "
                "missing"
            ) from error

    def lines(self, run_dir: Path) -> list[tuple[str, str]]:
        """Return what the terminal shows: labels and values."""
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
            cost += f" (of them {self.warm_start_s:.0f} s to warm-start the tiny reasoner, once)"
        return [
            ("held-out reward", f"{before} before, {after} after {self.steps} steps"),
            ("time", cost),
            ("rollout speed", f"{self.tokens_per_s:,.0f} tokens/s"),
            ("a step's time", breakdown),
            ("lost to the tail", f"{self.tail_idle_share:.0%} of the rollout's places stood empty"),
            (
                "lengths",
                f"median {self.length_p50:.0f} tokens, longest {self.length_max:.0f}; "
                f"in a step the longest is {self.max_over_median:.0f}x the median",
            ),
            *self._speculation_lines(),
            ("policy", f"{run_dir / 'checkpoints' / f'step_{self.steps:06d}' / 'policy'}"),
            ("metrics", str(run_dir / "metrics.jsonl")),
            ("rollouts", str(run_dir / "rollouts.jsonl")),
            ("card", str(run_dir / "card.json")),
            *_report_lines(run_dir),
        ]

    def _speculation_lines(self) -> list[tuple[str, str]]:
        said = []
        if self.accept_length is not None and self.emitted_share is not None:
            said.append(
                f"{self.accept_length:.2f} tokens a verify step, which wrote "
                f"{self.emitted_share:.0%} of all tokens"
            )
        if self.num_switches is not None and self.tuner_share is not None:
            plural = "" if self.num_switches == 1 else "es"
            said.append(
                f"{self.num_switches} switch{plural}, tuner {self.tuner_share:.1%} of the time"
            )
        lines = [("speculation", "; ".join(said))] if said else []
        if self.idle_utilization is not None:
            text = f"trained the drafter in {self.idle_utilization:.0%} of their time"
            lines.append(("idle workers", text))
        return lines


def finished_card(run_dir: Path, checkpoint: Checkpoint | None, steps: int) -> Card | None:
    """Return the card of a run whose checkpoint is its last one; None while there is more to do."""
    if checkpoint is None or checkpoint.step < steps:
        return None
    try:
        card = read_card(run_dir / "card.json")
    except (OSError, ValueError):  # none, or not one of ours: it is made again
        return None
    return card if card.steps == checkpoint.step else None


def read_card(path: Path) -> Card:
    """Read what `Card.write` wrote; OSError if it cannot be read, ValueError if it is no card."""
    written = read_json(path)
    known = {each.name: each.default is None or each.name in _MAY_LACK for each in fields(Card)}
    required = {each.name for each in fields(Card) if each.default is MISSING}
    if not isinstance(written, dict) or not required <= written.keys() <= known.keys():
        raise ValueError("it is no card")
    for name, may_lack in known.items():
        if not (is_number(written.get(name)) or (may_lack and written.get(name) is None)):
            raise ValueError(f"{name} is no number")
    return Card(**written)


def read_metrics(path: Path) -> list[dict[str, Number | None]]:
    """Read metrics.jsonl: one row a step, those of earlier sittings included.

    Leaves out lines that are torn or damaged, and values that are neither number nor null. Raises
    CheckpointError where the file cannot be read.
    """
    rows: list[dict[str, Number | None]] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}; put it back from a copy, then start again: only the card "
            "is missing"
        ) from error
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and is_number(row.get("step")):
                rows.append({n: v for n, v in row.items() if v is None or is_number(v)})
    return rows


def is_number(value: object) -> bool:
    """Tell whether what JSON held can be computed with."""
    return isinstance(value, int | float) and -_MOST < value < _MOST


def make_card(
    rows: Sequence[Mapping[str, Number | None]],
    *,
    steps: int,
    reward_after: float | None,
    seconds: float,
    warm_start_s: float,
) -> Card:
    """Sum up the rows of metrics.jsonl; the first one knows the reward before."""

    def values(name: str) -> list[float]:
        return [row.get(name) or 0.0 for row in rows]

    def total(name: str) -> float:
        return math.fsum(values(name))

    def median(name: str) -> float:
        return statistics.median(values(name) or [0.0])

    def values_where(name: str) -> list[float]:
        return [value for row in rows if (value := row.get(name)) is not None]

    def median_where(name: str) -> float | None:
        found = values_where(name)
        return statistics.median(found) if found else None

    whole, rollout = total("timing_s/step"), total("timing_s/rollout")
    shares = {name: total(f"timing_s/{name}") / whole if whole else 0.0 for name in SECTIONS}
    seconds_each = values("timing_s/rollout")

    def of_rollouts(name: str) -> float:
        parts = zip(values(name), seconds_each, strict=True)
        return sum(share * s for share, s in parts) / rollout if rollout else 0.0

    switches = values_where("speculation/switches")
    return Card(
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
        # Workers learn at the same time, so the parts of learning may add up to more than it took.
        other_share=max(1.0 - sum(shares.values()), 0.0) if whole else 0.0,
        tail_idle_share=of_rollouts("rollout/tail_idle_share"),
        length_p50=median("response_length/p50"),
        length_max=max(values("response_length/max"), default=0.0),
        max_over_median=median("response_length/max_over_median"),
        accept_length=median_where("speculation/accept_length"),
        emitted_share=median_where("speculation/emitted_share"),
        num_switches=int(sum(switches)) if switches else None,
        tuner_share=of_rollouts("speculation/tuner_share") if switches else None,
        idle_utilization=median("cluster/idle_utilization") if total("cluster/spot_s") else None,
    )


def _report_lines(run_dir: Path) -> list[tuple[str, str]]:
    """Say where the report is, or how to get one of a run that speculated."""
    if (run_dir / "report.html").exists():
        return [("report", str(run_dir / "report.html"))]
    if not (run_dir / "speculation.jsonl").exists():
        return []
    command = shlex.join(["longtail", "report", str(run_dir)])
    if find_spec("matplotlib") is None:
        command = f"{pip_install('plots')} && {command}"
    return [("report", f"to get one: {command}")]


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"
