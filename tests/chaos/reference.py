"""The undisturbed run, and the comparison of another one with it."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos import diary
from chaos.sitting import Failure, Sitting, leftovers

Milestone = tuple[int, str]
"""A step and a phase of it; reached when the phase ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Texts and times of an undisturbed run."""

    rollouts: Mapping[tuple[int, str], Any]
    """Text, reward, policy version and logprob by step and request."""
    weights: str | None
    """Digest of the last checkpoint's policy; None if its bits need not be met."""
    milestones: Mapping[Milestone, float]
    """Seconds from the beginning to the end of each phase."""
    lengths: Mapping[str, Sequence[float]]
    """Seconds that each activity lasted, each time, in rising order."""
    seconds: float


def undisturbed(words: Sequence[str], place: Path, *, patience_s: float) -> Reference:
    """Make a run in `place` and leave it alone. Raises Failure if it fails all the same."""
    run = place / "run"
    sitting = Sitting([*words, f"--run.dir={run}"], place / "sitting-0", patience_s=patience_s)
    try:
        sitting.wait_until(lambda: False)
        seconds = time.monotonic() - sitting.began
        if sitting.code != 0:
            raise Failure(f"the undisturbed run failed: {sitting.last_words}; see {sitting.log}")
    finally:
        sitting.end()
        left = leftovers(place)
    if left:
        raise Failure(f"the undisturbed run left processes: {left}")
    lengths = diary.lengths(sitting.diary.entered)
    return Reference(
        rollouts=rollouts_of(run),
        weights=weights_of(run),
        milestones={key: at - sitting.began for at, key in milestones(sitting)},
        lengths={name: sorted(each) for name, each in lengths.items()},
        seconds=seconds,
    )


def milestones(sitting: Sitting) -> list[tuple[float, Milestone]]:
    """Return when each phase of each step ended; what comes before the first step is left out."""
    return [
        (entry["at"], (entry["step"], entry["ended"]))
        for entry in sitting.diary.entries
        if "ended" in entry and entry["step"]
    ]


def rollouts_of(run: Path) -> dict[tuple[int, str], Any]:
    """Read what was written. Raises Failure if a rollout is there twice."""
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    kept = ("text", "reward", "policy_version", "logprob")
    found = {(row["step"], row["request_id"]): tuple(row[name] for name in kept) for row in rows}
    if len(found) != len(rows):
        raise Failure(f"{len(rows) - len(found)} rollouts are logged twice")
    return found


def weights_of(run: Path) -> str:
    """Digest the policy that the run ended with."""
    newest = max((run / "checkpoints").glob("step_*"))
    return hashlib.sha256((newest / "policy" / "model.safetensors").read_bytes()).hexdigest()


def differing(run: Path, reference: Reference) -> list[tuple[int, str]]:
    """Return the step and the request of each rollout that differs, or that one run lacks."""
    rollouts = rollouts_of(run)
    return sorted(
        key
        for key in reference.rollouts.keys() | rollouts.keys()
        if rollouts.get(key) != reference.rollouts.get(key)
    )
