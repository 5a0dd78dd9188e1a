"""The rollout engine: requests in, completions out, one flat batch a step.

    submit --> schedule --> draft --> flatten --> run --> accept --> append --> apply the previous
                  ^                                                    |        step's feedback
                  +--- finished: KV freed <----------------------------+            |
                                                                                StepReport

The engine owns the weights that generate and the KV of the requests in progress. It does not know
rewards, learning or files. It takes new weights only while no request is in progress.
"""

import time
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from longtail.engine import profile
from longtail.engine.batch import Results, Scheduled, accept_drafts, flatten
from longtail.engine.kv_cache import KVUsage, make_kv
from longtail.engine.request import ActiveRequest, ActiveRequests, EngineLimits
from longtail.engine.runner import ModelRunner, RunnerOutput
from longtail.engine.scheduler import Scheduler
from longtail.engine.speculation.speculator import Speculation, SpeculationReport, Speculator
from longtail.engine.text import Decode
from longtail.errors import RequestError
from longtail.generator import StepReport
from longtail.model.hf.weights import write_hf
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import NO_TAPS, Taps
from longtail.speculation.tree import Accepted
from longtail.tuner.cost import CostModel
from longtail.types import Request


class RolloutEngine(ActiveRequests):
    """longtail's own generator, on CPUs."""

    def __init__(
        self,
        model: Transformer,
        decode: Decode,
        limits: EngineLimits,
        *,
        policy_version: int = 0,
        speculation: Speculation | None = None,
    ) -> None:
        if limits.max_len > model.config.max_positions:
            raise RequestError(
                f"prompt and completion may reach {limits.max_len} tokens, but the model has "
                f"{model.config.max_positions} positions; lower rollout.max_tokens or "
                "data.max_prompt_len"
            )
        super().__init__(policy_version)
        self.model = model
        """The model that generates; drafters refer to it, and `load_policy` alone changes it."""
        self._decode, self._limits = decode, limits
        self.model.eval().pack()
        self._kv = make_kv(model, limits)
        self.scheduler = Scheduler(
            self._kv, max_running=limits.max_running, max_step_tokens=limits.max_step_tokens
        )
        self._runner = ModelRunner(model, self._kv)
        self._costs: CostModel | None = None
        """Costs of steps; None before they are measured."""
        self._speculator: Speculator | None = None
        self.speculate(speculation)

    def speculate(self, speculation: Speculation | None) -> None:
        """Use this speculation from the next step on, None: plain decoding; tokens do not change.

        Replaced drafters forget the requests in progress; new ones follow the present weights.
        Costs of steps are measured when they are first needed, in about a second, those of drafters
        each time.
        """
        before, drafters = self._speculator, () if speculation is None else speculation.ready
        if before is not None:
            before.detach(drafters, self._active)
        for drafter in drafters:
            if before is None or not any(drafter is each for each in before.drafters):
                drafter.refresh()
        self._speculator = None
        if speculation is None:
            return
        costs, model, limits = None, self.model, self._limits
        if speculation.guarded:
            self._costs = costs = self._costs or profile.measure_steps(model, limits)
            costs.drafts = [profile.measure_drafts(each, model, limits) for each in drafters]
        speculation.tuner.begin(costs, len(drafters))
        store = speculation.features
        if store is not None and (before is None or before.speculation.features is not store):
            store.clear()  # the weights may have changed meanwhile
        self._speculator = Speculator(speculation, model.config, costs)

    @property
    def speculation(self) -> Speculation | None:
        """The speculation in use, if any."""
        return None if self._speculator is None else self._speculator.speculation

    def kv_usage(self) -> KVUsage:
        """Return the free, owned and total tokens of KV memory."""
        return self._kv.usage()

    def load_policy(self, version: int, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Take all weights; after an error the engine is a mixture of policies, and of no use."""
        self._refuse_unless_idle(version)
        self.scheduler.forget()
        write_hf(self.model, parameters, f"policy version {version}")
        self.model.pack()
        if self._speculator is not None:
            self._speculator.observations.refresh()
        self._policy_version = version

    def load_drafter(self, tensors: Mapping[str, Tensor]) -> None:
        """Draft with other weights; a fresh drafter begins to draft with its first ones."""
        assert self._speculator is not None, "no drafter was given"
        speculation = self._speculator.speculation
        speculation.load_weights(tensors)
        if speculation.ready == self._speculator.drafters:
            self._speculator.reset_estimates()
        else:
            self.speculate(speculation)

    def sleep(self) -> None:
        """Keep the KV memory of an idle engine, which later requests use."""
        assert not self._active, "requests in progress need their keys and values"

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError if this engine can never serve it."""
        self.check(request)
        self.scheduler.add(self._begin(request))

    def abort(self, request_id: str) -> None:
        """Remove an unfinished request."""
        self._remove(self._in_progress(request_id))
        if self._speculator is not None and not self._active:
            self._speculator.end()

    def step(self) -> StepReport:
        """Compute one flat batch and append the tokens that it yields.

        An error of one request ends that request only, see `StepReport.failed`. After any other
        exception the engine must not be used again.
        """
        started = time.perf_counter()
        scheduled, speculator = self._schedule(), self._speculator
        if speculator is None:
            (out, accepted, results), speculated = self._compute(scheduled), SpeculationReport()
        else:
            spare = self._limits.max_step_tokens - sum(each.num_tokens for each in scheduled)
            scheduled = speculator.draft(scheduled, self._runner.sampler, spare, self._kv.try_grow)
            out, accepted, results = self._compute(scheduled, speculator.observations.taps)
            is_last = not self._active
            speculated = speculator.record(scheduled, accepted, out.features, is_last=is_last)
        return StepReport(
            num_tokens=sum(each.num_tokens + each.draft.size for each in scheduled),
            num_running=len(scheduled),
            emitted=tuple(results.emitted),
            finished=tuple(results.finished),
            failed=tuple(results.failed),
            step_s=time.perf_counter() - started,
            forward_s=out.forward_s,
            sample_s=out.sample_s,
            draft_s=speculated.draft_s,
            draft_forward_s=speculated.draft_forward_s,
            tuner_s=speculated.tuner_s,
            verified=speculated.verified,
            switch=speculated.switch,
            speculates=speculator is not None,
        )

    def _schedule(self) -> Sequence[Scheduled]:
        """Choose the step's requests; those with few tokens come first in the batch."""
        scheduled = sorted(self.scheduler.schedule(), key=lambda each: each.num_tokens)
        assert scheduled, "step() needs an unfinished request"
        return scheduled

    def _compute(
        self, scheduled: Sequence[Scheduled], taps: Taps = NO_TAPS
    ) -> tuple[RunnerOutput, Mapping[str, Accepted], Results]:
        """Run a step with its drafts, verify them, and append the tokens that it yields."""
        batch = flatten(scheduled)
        sampled = [each for each in scheduled if each.draws]
        out = self._runner.run(batch, sampled, taps)
        accepted, logprobs = accept_drafts(sampled, out.tokens, out.logprobs)
        self._commit(scheduled, accepted)
        results = Results()
        for each in sampled:
            active, name = each.active, each.active.request_id
            if results.append(active, accepted[name].tokens, logprobs[name], self._decode):
                self._remove(active)
        return out, accepted, results

    def _commit(self, scheduled: Sequence[Scheduled], accepted: Mapping[str, Accepted]) -> None:
        """Count tokens computed for good, and move accepted nodes to their slots in the KV.

        Requests without a draft take part: KV may have been reserved for a draft that was empty.
        """
        paths: dict[str, tuple[int, Sequence[int]]] = {}
        for each in scheduled:
            active, name = each.active, each.active.request_id
            active.num_computed += each.num_tokens
            if name in accepted:
                path = accepted[name].path
                paths[name] = active.num_computed, path
                active.num_computed += len(path)
        self._kv.keep(paths)

    def _remove(self, active: ActiveRequest) -> None:
        """Remove an unfinished request everywhere."""
        del self._active[active.request_id]
        self.scheduler.withdraw(active)
        active.is_done = True
        if self._speculator is not None:
            self._speculator.observations.forget(active)

    def check(self, request: Request) -> None:
        """Raise RequestError if this engine can never serve the request; thread-safe."""
        self._check(request, self.model.config.vocab_size, self._limits.max_len)
