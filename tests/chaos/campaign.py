"""Kill workers and drivers of small runs at random moments, and see that nothing comes of it.

    make chaos MINUTES=20
    make chaos SEED=7 ONLY=3       trial 3 of a campaign again

A trial is a run of the tiny reasoner: rollouts, spot training, learning, checkpoints. Its processes
are killed (SIGKILL) as a plan says, it is started again whenever it has ended, and in the end its
texts, rewards, logprobs and weights must be those of the undisturbed run. A run that shows nothing
new for `--patience` seconds hangs, which is a failure, as are a traceback, an exit without the
sentence that asks for a new start, and processes that outlive the run. The directory of a trial
that failed is kept, with the stacks of all threads if it hung. The last line is a JSON object.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from chaos.diary import DRIVER
from chaos.plan import Plan, plans
from chaos.reference import Reference, undisturbed
from chaos.sitting import Failure
from chaos.trial import Kill, Outcome, Trial
from longtail.model.kernels import native
from longtail.system.device import DTYPES

_HANG_S = 30
WORDS = (
    "train",
    "--data.size=64",
    "--data.heldout_size=0",
    "--data.shuffle=false",
    "--rollout.prompts_per_step=4",
    "--rollout.group_size=4",
    "--rollout.max_tokens=320",
    "--rollout.max_running=4",  # several waves, so that a share is not over in a moment
    "--learner.learning_rate=3e-4",
    "--learner.tokens_per_micro_batch=1024",
    "--speculation.drafter=tiny-reasoner",
    "--run.device=cpu",
    f"--cluster.hang_s={_HANG_S}",
)
"""A small run of the embedded model, beside what a plan chooses."""


@dataclass
class Campaign:
    """Trials one after the other, and what they add up to."""

    place: Path
    steps: int
    patience_s: float
    references: dict[tuple[str, int], Reference] = field(default_factory=dict)
    outcomes: list[tuple[Plan, Outcome]] = field(default_factory=list)

    def run(self, plan: Plan) -> None:
        """Make a trial, and the undisturbed run of its kind if there is none yet."""
        reference = self._reference(plan)
        place = self.place / f"trial-{plan.number}"
        words = [
            *self._words(plan),
            f"--spot.train={plan.trains}",
            f"--run.checkpoint_every={plan.checkpoint_every}",
        ]
        trial = Trial(words, plan.strikes, reference, place, patience_s=self.patience_s)
        outcome = trial.run()
        self.outcomes.append((plan, outcome))
        print(_line(plan, outcome), flush=True)
        if outcome.failure:
            print(f"          {outcome.failure}\n          kept in {place}", flush=True)
        else:
            shutil.rmtree(place)

    def _reference(self, plan: Plan) -> Reference:
        key = (plan.dtype, plan.workers)
        if key not in self.references:
            place = self.place / f"undisturbed-{plan.dtype}-{plan.workers}"
            words = [*self._words(plan), "--run.checkpoint_every=1"]
            self.references[key] = found = undisturbed(words, place, patience_s=self.patience_s)
            print(
                f"undisturbed {plan.dtype}, {plan.workers} workers: {len(found.rollouts)} "
                f"rollouts in {found.seconds:.0f} s",
                flush=True,
            )
        return self.references[key]

    def _words(self, plan: Plan) -> list[str]:
        return [
            *WORDS,
            f"--rollout.dtype={plan.dtype}",
            f"--cluster.workers={plan.workers}",
            f"--run.threads={plan.workers}",
            f"--run.steps={self.steps}",
        ]


def _line(plan: Plan, outcome: Outcome) -> str:
    kills = ", ".join(kill.state for kill in outcome.kills) or "none"
    result = "FAILED" if outcome.failure else "equal"
    return (
        f"trial {plan.number:3}  {plan.dtype}, {plan.workers} workers  {outcome.seconds:4.0f} s  "
        f"{result}  killed: {kills}"
    )


def summary(outcomes: Sequence[tuple[Plan, Outcome]], seed: int, minutes: float) -> dict[str, Any]:
    """Add up the trials."""
    kills = [kill for _, outcome in outcomes for kill in outcome.kills]
    lost = {
        whose: [k.lost_s for k in kills if k.recovery and (k.who == DRIVER) == (whose == "driver")]
        for whose in ("worker", "driver")
    }
    return {
        "seed": seed,
        "minutes": round(minutes, 1),
        "runs": len(outcomes),
        "kills": len(kills),
        "kills_by_state": dict(sorted(Counter(kill.state for kill in kills).items())),
        "recoveries": dict(Counter(kill.recovery for kill in kills if kill.recovery)),
        "seconds_lost": {
            whose: {"median": _rounded(each, median), "worst": _rounded(each, max)}
            for whose, each in lost.items()
        },
        "missed": sum(outcome.missed for _, outcome in outcomes),
        "ended_with_a_sentence": sum(len(outcome.sentences) for _, outcome in outcomes),
        "rollouts_compared": sum(outcome.num_rollouts for _, outcome in outcomes),
        "rollouts_different": sum(outcome.num_different for _, outcome in outcomes),
        "failures": [
            {"trial": plan.number, "dtype": plan.dtype, "workers": plan.workers, "what": o.failure}
            for plan, o in outcomes
            if o.failure
        ],
    }


def table(kills: Iterable[Kill]) -> str:
    """Show kills by the state of the victim."""
    by_state: dict[str, list[Kill]] = {}
    for kill in kills:
        by_state.setdefault(kill.state, []).append(kill)
    lines = [f"{'killed while':32}{'kills':>6}{'recovered':>11}{'s lost, median':>16}{'worst':>8}"]
    for state, own in sorted(by_state.items()):
        lost = [kill.lost_s for kill in own if kill.recovery]
        shown = (f"{median(lost):.1f}", f"{max(lost):.1f}") if lost else ("", "")
        lines.append(f"{state:32}{len(own):6}{len(lost):11}{shown[0]:>16}{shown[1]:>8}")
    return "\n".join(lines)


def exact_dtypes() -> list[str]:
    """Return the dtypes in which a text does not depend on its batch on this machine."""
    return [name for name in ("float32", "bfloat16") if native.layout(DTYPES[name]) is not None]


def _rounded(values: Sequence[float], of: Any) -> float | None:
    return round(of(values), 1) if values else None


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="begin trials for so long")
    parser.add_argument("--seed", type=int, default=0, help="of all plans")
    parser.add_argument("--only", type=int, help="number of the one trial to make")
    parser.add_argument("--steps", type=int, default=16, help="of each run")
    parser.add_argument("--dtypes", help="of the rollouts, in turn; default: all exact ones here")
    parser.add_argument("--workers", default="2,3", help="of each run, in turn")
    parser.add_argument("--blows", type=int, default=3, help="of each run; some are two kills")
    parser.add_argument("--patience", type=float, default=150.0, help="seconds until it is a hang")
    parser.add_argument("--dir", type=Path, help="new directory; default: a temporary one")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run a campaign; 1 if a trial failed."""
    own = _arguments(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    place = own.dir or Path(tempfile.mkdtemp(prefix="chaos-"))
    campaign = Campaign(place, own.steps, own.patience)
    counts = [int(number) for number in own.workers.split(",")]
    dtypes = own.dtypes.split(",") if own.dtypes else exact_dtypes()
    if not dtypes:
        print("no native kernels here, so texts may depend on their batch: see `longtail doctor`")
        return 2
    print(f"seed {own.seed}, {' and '.join(dtypes)}, {own.workers} workers, in {place}", flush=True)
    began = time.monotonic()
    dealt = plans(own.seed, dtypes, counts, blows=own.blows)
    try:
        for plan in dealt:
            if own.only is None or plan.number == own.only:
                campaign.run(plan)
            if plan.number == own.only or time.monotonic() - began > 60 * own.minutes:
                break
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    except Failure as failure:
        print(f"{failure}; see {place}", flush=True)
        return 1
    found = summary(campaign.outcomes, own.seed, (time.monotonic() - began) / 60)
    print(f"\n{table(kill for _, outcome in campaign.outcomes for kill in outcome.kills)}\n")
    print(json.dumps(found))
    if found["failures"]:
        return 1
    if own.dir is None:
        shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
