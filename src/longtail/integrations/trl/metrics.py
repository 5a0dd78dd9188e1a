"""Metrics of rollouts under verl's names, summed over all processes of a job."""

from typing import final

from longtail.engine.report import RolloutReport
from longtail.integrations.trl.ranks import Ranks

_SUMS = (
    "rollouts", "gen_s", "wait_s", "train_s", "trained_tokens",
    "generated", "drafted", "accepted", "verified",
)  # fmt: skip


@final
class SessionMetrics:
    """Adds this process's counts to the sums of the job, and reads their rise."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._before = dict.fromkeys(_SUMS, 0.0)

    def add_rollout(self) -> None:
        """Count a batch of this process."""
        self._ranks.add("rollouts", 1.0)

    def add(self, report: RolloutReport, gen_s: float) -> None:
        """Add a turn of the batch."""
        self._ranks.add("gen_s", gen_s)
        self._ranks.add("generated", report.num_generated)
        self._ranks.add("drafted", report.num_drafted)
        self._ranks.add("accepted", report.num_accepted)
        self._ranks.add("verified", report.num_verified)

    def add_waiting(self, seconds: float) -> None:
        """Add the time from this process's last text to the last one of all."""
        self._ranks.add("wait_s", seconds)

    def drain(self) -> dict[str, float]:
        """Return the means of a rollout since the last call; empty without one."""
        now = {name: self._ranks.total(name) for name in _SUMS}
        new = {name: now[name] - self._before[name] for name in _SUMS}
        if new["rollouts"] < 0.5:
            return {}
        self._before = now
        count = new["rollouts"]  # of each process; seconds are means over the processes
        wall_s = new["gen_s"] + new["wait_s"]
        metrics = {
            "timing_s/gen": wall_s / count,
            "timing_s/drafter": new["train_s"] / count,
            "rollout/generated_tokens": new["generated"] * self._ranks.size / count,
            "rollout/tokens_per_s": new["generated"] * self._ranks.size / wall_s,
            "drafter/trained_tokens": new["trained_tokens"] * self._ranks.size / count,
        }
        if new["verified"]:
            accepted, verified = new["accepted"], new["verified"]
            metrics["rollout/spec_accept_length"] = (accepted + verified) / verified
            metrics["rollout/spec_accept_rate"] = accepted / max(new["drafted"], 1.0)
        if self._ranks.size > 1:
            metrics["idle/ratio"] = new["wait_s"] / wall_s
            metrics["idle/utilization"] = min(new["train_s"] / max(new["wait_s"], 1e-6), 1.0)
        return metrics
