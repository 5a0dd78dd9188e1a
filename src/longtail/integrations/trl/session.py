"""Rollouts of one TRL trainer: policy, drafters and what they learn, keys, metrics, state.

The policy is a copy of the trainer's weights, which is written in place at each change. At the
begin of a rollout the processes exchange the sums of the completions since the last one. A single
process also learns from them after each rollout.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

from torch import Tensor

from longtail.assembly.drafters import Target, drafter_names, open_speculation, open_trainable
from longtail.assembly.worker import make_drafting
from longtail.cluster.work.drafter_versions import DrafterVersions
from longtail.config.rl import SpotSection
from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.engine.engine import RolloutEngine
from longtail.engine.report import RolloutReport
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import ConfigError, NonFiniteError
from longtail.integrations.trl.noise_keys import Batch, Tokens, Turns
from longtail.integrations.trl.patches import Ranks
from longtail.model.hf.weights import write_hf
from longtail.run.drafter_store import INITIAL, DrafterStore
from longtail.speculation.drafter import Statistics
from longtail.system.device import compute_threads, rollout_threads, to_stderr
from longtail.types import Completion, Request, SamplingParams

FOLDER = "longtail"
"""Name of the drafter's folder in a checkpoint of the trainer."""


@final
class Session:
    """Owns the policy's copy and all that drafts for it. `pull` first, then `generate`.

    `target` is the model that generates, empty until then. Sequences have at most `max_len`
    tokens, prompts included.
    """

    def __init__(
        self,
        target: Target,
        ranks: Ranks,
        drafter: str,
        *,
        max_running: int,
        max_len: int,
        learns: bool,
    ) -> None:
        self.target, self.ranks = target, ranks
        self._drafter, self._learns = drafter, learns
        self.max_len = min(max_len, target.model.config.max_positions)
        """Most tokens of a prompt and its completion."""
        self._limits = EngineLimits.of(max_running, self.max_len)
        self._engine: RolloutEngine | None = None
        self._turns = Turns()
        self._metrics = SessionMetrics(ranks)
        self._speculation: Speculation | None = None
        self._initial: LoadedDrafter | None = None
        self._statistics: Statistics | None = None
        """Adds up what is written, for a drafter that learns from it; it has versions, too."""
        self._versions: DrafterVersions | None = None
        self._num_rollouts = 0
        self._threads = rollout_threads(target.model.config.hidden_size)

    def pull(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Take the trainer's weights, by Hugging Face's names; the first ones open drafters."""
        if self._engine is not None:
            self._engine.load_policy(self._engine.policy_version + 1, parameters)
            return
        model = self.target.model
        write_hf(model, parameters, "pull 1")
        decode = self.target.tokenizer.decode
        self._engine = RolloutEngine(model, decode, self._limits, policy_version=1)
        self._open_drafters()

    def generate(
        self, prompts: Sequence[Tokens], params: SamplingParams, batch: Batch
    ) -> list[Completion]:
        """Return one completion of each prompt, in order; drafters learn none of evaluations."""
        engine = self._engine
        assert engine is not None, "weights were pulled"
        samples, is_first = self._turns.begin(prompts, batch)
        begins = is_first and batch.is_training
        if begins:
            self._metrics.begin()
            self._exchange()
            self._num_rollouts += 1
        requests = [
            Request(
                request_id=each.request_id,
                prompt_tokens=each.prompt,
                noise_key=each.key,
                sampling=self._fitting(params, len(each.prompt)),
                group_id=each.group,
            )
            for each in samples
        ]
        if self._statistics is not None:
            self._statistics.is_on = batch.is_training
        report, began = RolloutReport(), time.perf_counter()
        with compute_threads(self._threads):
            if engine.speculation is not self._speculation:
                engine.speculate(self._speculation)
            completions = engine.generate(requests, report.add)
        if batch.is_training:
            self._metrics.add(report, time.perf_counter() - began)
        if begins and self.ranks.size == 1:
            self._exchange()
        self._turns.end(samples, [each.tokens for each in completions])
        return completions

    def _fitting(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """Return the parameters with no more tokens than the model has positions."""
        room = self.max_len - prompt_len
        if room < 1:
            raise ConfigError(
                f"a prompt has {prompt_len} tokens, and the model has {self.max_len} "
                "positions (or vllm_max_model_length); shorten the prompts of the data set"
            )
        return params if room >= params.max_tokens else replace(params, max_tokens=room)

    def _log(self, line: str) -> None:
        if self.ranks.rank == 0:
            to_stderr(line)

    # ---- drafters

    def _open_drafters(self) -> None:
        # Only a drafter that follows from sums learns here: features would serve gradients.
        spot = SpotSection(train="spot" if self._learns else "never", features_mb=0)
        names = drafter_names(self._drafter, self.target.name, learns=self._learns)
        speculation = open_speculation(names, self.target, spot=spot)
        self._speculation = speculation
        loaded = open_trainable(names, self.target)
        if speculation is None or loaded is None:
            return
        self._initial, self._statistics = loaded.copied(), speculation.statistics
        if self._statistics is not None:
            drafting = make_drafting(spot, loaded, self.target.model, speculation, seed=0)
            self._versions = DrafterVersions(drafting.served, drafting.buffer, drafting.sums)

    def _exchange(self) -> None:
        """Add up the sums of all processes; each solves them, on one thread, to equal bits."""
        if self._statistics is None or self._versions is None:
            return
        own, versions = self._statistics.take(), self._versions
        num_new = versions.add_sums(
            own.restored(self.ranks.broadcast(own.tensors(), rank))
            for rank in range(self.ranks.size)
        )
        if num_new and versions.sums is not None:
            try:
                with compute_threads(1):
                    tensors = versions.sums.weights(self.target.tokenizer.eos_ids)
            except NonFiniteError as error:  # in all processes, whose sums are equal
                self._log(f"the drafter keeps its weights: {error}")
                return
            versions.publish(versions.offer_solved(tensors, num_new))
            self._load_drafter(versions.published.tensors)

    def _load_drafter(self, tensors: Mapping[str, Tensor]) -> None:
        assert self._speculation is not None, "there is a drafter"
        if self._engine is None or self._engine.speculation is None:
            self._speculation.load_weights(tensors)
        else:
            self._engine.load_drafter(tensors)

    def drafter(self) -> LoadedDrafter | None:
        """Copy the drafter in use; None without one that has weights."""
        if self._initial is None:
            return None
        copied = self._initial.copied()
        return copied if self._versions is None else self._versions.state().put_into(copied)

    # ---- metrics and state

    def drain_metrics(self) -> dict[str, float]:
        """Return the metrics of the rollouts since the last call, of all processes together."""
        found = self._metrics.drain()
        if found and self._versions is not None:
            found |= self._versions.metrics()
        return found

    def save(self, checkpoint: Path, step: int) -> None:
        """Write the drafter into a checkpoint; without one that learns, nothing."""
        if self._versions is None or self._initial is None:
            return
        folder = checkpoint / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._initial.save(folder / INITIAL)
        state = self._versions.state(rollouts=self._num_rollouts)
        DrafterStore(folder, keep=1).save(step, state)

    def restore(self, checkpoint: Path, step: int) -> bool:
        """Continue with the drafter of a checkpoint; return whether there is one."""
        if self._versions is None:
            return False
        state = DrafterStore(checkpoint / FOLDER).load(step)
        if state is None:
            return False
        weights = self._versions.restore(state)
        self._num_rollouts = state.numbers["rollouts"]
        self._load_drafter(weights.tensors)
        self._log(f"drafter version {weights.version} from {checkpoint}")
        return True


@final
class SessionMetrics:
    """Means over the rollouts of a job since the last call of `drain`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sums = [0.0] * 6
        """Rollouts, their seconds, and tokens generated, drafted, accepted; drafts verified."""

    def begin(self) -> None:
        """Count a rollout of this process."""
        self._sums[0] += 1.0

    def add(self, report: RolloutReport, gen_s: float) -> None:
        """Add a turn of the batch."""
        drafts = (report.num_drafted, report.num_accepted, report.num_verified)
        own = (0, gen_s, report.num_generated, *drafts)
        self._sums = [total + number for total, number in zip(self._sums, own, strict=True)]

    def drain(self) -> dict[str, float]:
        """Return the means of a rollout over all processes, which all call this; {} without one."""
        sums = self._ranks.sums(self._sums)
        self._sums = [0.0] * len(sums)
        rollouts, gen_s, generated, drafted, accepted, verified = sums
        if not rollouts:
            return {}
        size = self._ranks.size
        metrics = {  # seconds are means over the processes, tokens are those of all
            "timing_s/gen": gen_s / rollouts,
            "rollout/generated_tokens": generated * size / rollouts,
            "rollout/tokens_per_s": generated * size / gen_s,
        }
        if verified:
            metrics["rollout/spec_accept_length"] = (accepted + verified) / verified
            metrics["rollout/spec_accept_rate"] = accepted / max(drafted, 1.0)
        return metrics
