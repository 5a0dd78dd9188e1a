"""Rollouts for one trainer: its policy, its drafters and their training, keys, metrics, state."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from torch import Tensor

from longtail.assembly.drafters import FRESH, Target, drafter_names, open_drafters, open_trainable
from longtail.assembly.worker import feature_store, make_drafting, without_fresh
from longtail.config.rl import SpotSection
from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.engine.report import RolloutMeter, RolloutReport, StepReport
from longtail.engine.rollout_log import RolloutLog
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import ConfigError
from longtail.integrations.mirror import MirroredPolicy
from longtail.integrations.trl.host import Ranks
from longtail.integrations.trl.training import DrafterTraining
from longtail.integrations.trl.turns import Batch, Tokens, Turn, Turns
from longtail.run.drafter_store import INITIAL, DrafterStore
from longtail.system.device import compute_threads, rollout_threads
from longtail.tuner.budget import BudgetTuner
from longtail.types import Completion, Request, SamplingParams

FOLDER = "longtail"
"""Name of the drafter's folder in a checkpoint of the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCall:
    """One call of the generator by the trainer.

    Example: RolloutCall(prompts=((3, 9), (3, 9)), params=SamplingParams(), seed=0, step=5,
                         steps_left=95, is_training=True)
    """

    prompts: tuple[Tokens, ...]
    params: SamplingParams
    seed: int
    step: int
    """Number of the trainer's updates so far."""
    steps_left: int
    is_training: bool
    """False in an evaluation, whose texts no drafter learns."""


@final
class Session:
    """Owns the policy's copy and all that drafts for it. `pull` first, then `generate`.

    `target` is the model that generates.
    """

    def __init__(
        self,
        target: Target,
        policy: MirroredPolicy,
        ranks: Ranks,
        drafter: str,
        *,
        trains: bool,
        log: Callable[[str], None],
    ) -> None:
        self.target, self.policy, self._ranks = target, policy, ranks
        self._drafter, self._trains, self._log = drafter, trains, log
        self._turns = Turns()
        self._metrics = SessionMetrics(ranks)
        self._is_open = self._has_tools = False
        self._initial: LoadedDrafter | None = None
        self._training: DrafterTraining | None = None
        self._threads = rollout_threads(target.model.config.hidden_size)

    def pull(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Take the trainer's weights; drafters are opened with the first ones."""
        self.policy.pull(parameters)
        if not self._is_open:
            self._is_open = True
            self._open_drafters()

    def generate(self, call: RolloutCall) -> list[Completion]:
        """Return one completion of each prompt, in their order."""
        assert self._is_open, "weights were pulled"
        batch = Batch(
            seed=call.seed,
            step=call.step,
            is_training=call.is_training,
            first=self._ranks.rank * len(call.prompts),
        )
        turn = self._turns.begin(call.prompts, batch)
        self._has_tools = self._has_tools or not turn.is_first
        if turn.is_first and call.is_training:
            self._metrics.add_rollout()
            if self._training is not None:
                self._training.begin()
        requests = [
            Request(
                request_id=each.request_id,
                prompt_tokens=each.prompt,
                noise_key=each.key,
                sampling=self._fitting(call.params, len(each.prompt)),
                group_id=each.group,
            )
            for each in turn.samples
        ]
        completions = self._generate(requests, turn, call)
        self._turns.end(turn, [each.tokens for each in completions])
        self.policy.sleep()
        return completions

    def _fitting(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """Return the parameters with no more tokens than the model has positions."""
        room = self.policy.max_len - prompt_len
        if room < 1:
            raise ConfigError(
                f"a prompt has {prompt_len} tokens, and the model has {self.policy.max_len} "
                "positions (or vllm_max_model_length); shorten the prompts of the data set"
            )
        return params if room >= params.max_tokens else replace(params, max_tokens=room)

    def _generate(
        self, requests: Sequence[Request], turn: Turn, call: RolloutCall
    ) -> list[Completion]:
        meter, log = RolloutMeter(), RolloutLog()

        def on_step(step: StepReport) -> None:
            meter.add(step)
            log.add(step)

        began = time.perf_counter()
        with compute_threads(self._threads):
            completions = self.policy.generate(requests, on_step)
        gen_s = time.perf_counter() - began
        if call.is_training:
            self._metrics.add(meter.report(), gen_s)
        training = self._training
        if training is None or not call.is_training:
            return completions
        training.add(requests, completions)
        if not turn.is_first:
            return completions
        training.end_share()
        if self._ranks.size > 1 and not self._has_tools:
            self._metrics.add_waiting(training.train_waiting())
        else:
            costs = self.policy.engine.costs
            training.train_share(gen_s, log.series(), costs, call.steps_left)
        return completions

    # ---- drafters

    def _open_drafters(self) -> None:
        spot = SpotSection(train="spot" if self._trains else "never")
        names = drafter_names(self._drafter, self.target.name, learns=self._trains)
        drafters = open_drafters(names, self.target, self._log)
        if not drafters:
            return
        speculation = Speculation(
            drafters=drafters,
            tuner=BudgetTuner(),
            features=feature_store(spot, drafters),
        )
        is_fresh = FRESH in names
        first = without_fresh(speculation, names) if is_fresh else speculation
        self.policy.speculate(first, speculation)
        loaded = open_trainable(names, self.target, self._log)
        self._initial = None if loaded is None else loaded.copied()
        drafting = make_drafting(
            spot,
            self.target,
            speculation,
            lambda: loaded,
            seed=self._ranks.rank,  # or all would train the same replica
            is_fresh=is_fresh,
        )
        if drafting is not None:
            self._training = DrafterTraining(drafting, self._ranks, self.policy)

    def drafter(self) -> LoadedDrafter | None:
        """Copy the drafter in use, with its training; None without one that can be trained."""
        if self._initial is None:
            return None
        copied = self._initial.copied()
        if self._training is None:
            return copied
        return self._training.trained(copied)

    # ---- metrics and state

    def drain_metrics(self) -> dict[str, float]:
        """Return the metrics of the rollouts since the last call, of all processes together."""
        found = self._metrics.drain()
        if found and self._training is not None:
            found["drafter/version"] = float(self._training.served.version)
            if self._training.accept_len is not None:
                found["drafter/expected_accept_length"] = self._training.accept_len
        return found

    def save(self, checkpoint: Path, step: int) -> None:
        """Write the drafter into a checkpoint; without one that is trained, nothing."""
        if self._training is None or self._initial is None:
            return
        folder = checkpoint / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._initial.save(folder / INITIAL)
        store = DrafterStore(folder, keep=1)
        store.save(step, self._training.state())
        store.wait()

    def restore(self, checkpoint: Path, step: int) -> bool:
        """Continue with the drafter of a checkpoint; return whether there is one."""
        if self._training is None:
            return False
        state = DrafterStore(checkpoint / FOLDER).load(step)
        if state is None:
            return False
        self._training.restore(state)
        self._log(f"drafter version {self._training.served.version} from {checkpoint}")
        return True


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
