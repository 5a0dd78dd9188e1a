"""The rollout engine: requests in, completions out, one flat batch a step.

    submit --> schedule --> draft --> flatten --> launch ------------> wait --> accept, commit
                  ^                               (apply the previous               |
                  |                                step's feedback)               append
                  +--- finished: KV freed <-----------------------------------------+--> StepReport

The engine owns the weights that generate and the KV of the requests in progress. It does not know
rewards, learning or files. It takes new weights only while no request is in progress.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from longtail.engine.batch import (
    FlatBatch,
    Scheduled,
    StepOutputs,
    accept_drafts,
    append_tokens,
    complete,
    flatten,
)
from longtail.engine.kv.cache import KeptPath, KVUsage
from longtail.engine.kv.choice import make_kv
from longtail.engine.profile import Profiler
from longtail.engine.report import Emitted, Failed, Piece, StepReport
from longtail.engine.request import ActiveRequest, EngineLimits
from longtail.engine.scheduler import Scheduler, SchedulerCounts
from longtail.engine.speculation.speculator import (
    NoSpeculation,
    Speculation,
    SpeculationRecord,
    Speculator,
)
from longtail.engine.step.runner import ModelRunner, RunnerOutput, StepTimer
from longtail.engine.text import Decode, Reader
from longtail.errors import RequestError
from longtail.model.hf.weights import hf_rows
from longtail.model.transformer import Transformer
from longtail.speculation.tree import Accepted
from longtail.types import Completion, FinishReason, PolicyWeights, Request


class RolloutEngine:
    """Generates under one policy version at a time."""

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
        self._model, self._decode, self._limits = model, decode, limits
        self._model.eval().pack()
        self._policy_version = policy_version
        self._kv = make_kv(model, limits)
        self._scheduler = Scheduler(
            self._kv, max_running=limits.max_running, max_step_tokens=limits.max_step_tokens
        )
        self._runner = ModelRunner(model, self._kv)
        self._active: dict[str, ActiveRequest] = {}
        self._profiler = Profiler(model, limits)
        self._begun: Speculation | None = None
        self._speculator: Speculator | NoSpeculation = NoSpeculation()
        self.speculate(speculation)

    def speculate(self, speculation: Speculation | None) -> None:
        """Use this speculation from the next step on, None: plain decoding; tokens do not change.

        Replaced drafters forget the requests in progress; new ones follow the present weights.
        Step costs are measured when they are first needed, in about a second.
        """
        before, drafters = self._speculator, () if speculation is None else speculation.drafters
        before.detach(drafters, self._active)
        for drafter in drafters:
            if not any(drafter is each for each in before.drafters):
                drafter.refresh()
        self._speculator = NoSpeculation()
        if speculation is None:
            return
        costs = self._profiler.measure(drafters) if speculation.needs_costs else None
        if speculation is not self._begun:  # a speculation that returns keeps its tuner's state
            speculation.tuner.begin(costs, len(drafters))
        self._begun = speculation
        self._speculator = Speculator(speculation, self._model.config, costs, before)

    @property
    def model(self) -> Transformer:
        """The model that generates; drafters refer to it, and only `pull` changes its weights."""
        return self._model

    def reset_estimates(self) -> None:
        """Estimate the gain of drafting anew, since a drafter was changed; tokens do not change."""
        self._speculator.reset_estimates()

    @property
    def speculation(self) -> Speculation | None:
        """The speculation in use, if any."""
        return self._speculator.speculation

    @property
    def policy_version(self) -> int:
        """Version of the present weights."""
        return self._policy_version

    @property
    def num_unfinished(self) -> int:
        """Number of waiting and running requests."""
        return len(self._active)

    def is_unfinished(self, request_id: str) -> bool:
        """Return whether the request waits or runs."""
        return request_id in self._active

    def unfinished(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Return (id, tokens so far, prompt length) of each unfinished request; thread-safe."""
        return [
            (request_id, tuple(active.tokens), active.prompt_len)
            for request_id, active in list(self._active.items())
        ]

    def kv_usage(self) -> KVUsage:
        """Return the free, owned and total tokens of KV memory."""
        return self._kv.usage()

    def scheduler_counts(self) -> SchedulerCounts:
        """Return the numbers of preemptions and of shared prompt tokens so far."""
        return self._scheduler.counts()

    def pull(self, weights: PolicyWeights) -> None:
        """Load published weights; the engine must be idle, so that no completion mixes policies."""
        if self._active:
            raise RequestError(
                f"{self.num_unfinished} requests are unfinished: finish or abort them before "
                f"pulling policy version {weights.version}"
            )
        rows = hf_rows(self._model)
        own = {name: tuple(row.shape) for name, row in rows.items()}
        given = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
        if own != given:
            odd = min(n for n in own.keys() | given.keys() if own.get(n) != given.get(n))
            raise RequestError(
                f"policy version {weights.version} is of another model: {odd} has shape "
                f"{given.get(odd)} there, {own.get(odd)} here"
            )
        with torch.no_grad():
            for name, row in rows.items():
                row.copy_(weights.tensors[name])
        self._model.pack()
        self._speculator.refresh()
        self._policy_version = weights.version

    def sleep(self, *, fully: bool = False) -> None:
        """Free the KV memory of an idle engine; `fully`, even where later requests are slowed."""
        assert not self._active, "requests in progress need their keys and values"
        self._kv.sleep(fully=fully)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError if this engine can never serve it."""
        self.check(request)
        self._kv.wake()
        active = ActiveRequest(
            request=request,
            tokens=list(request.prompt_tokens),
            policy_version=self._policy_version,
        )
        self._active[request.request_id] = active
        self._scheduler.add(active)

    def abort(self, request_id: str) -> Completion:
        """Remove an unfinished request and return its completion so far."""
        if request_id not in self._active:
            raise RequestError(f"request {request_id!r} is not in progress")
        active = self._active[request_id]
        self._remove(active)
        self._on_idle()
        return complete(active, FinishReason.ABORT, self._decode)

    def step(self) -> StepReport:
        """Compute one flat batch and append the tokens that it yields.

        An error of one request ends that request only, see `StepReport.failed`. After any other
        exception the engine must not be used again.
        """
        speculator = self._speculator
        timer = speculator.timer
        timer.start()
        scheduled = self._schedule()
        with timer.draft:
            spare = self._limits.max_step_tokens - sum(each.num_tokens for each in scheduled)
            noise = self._runner.sampler.noise
            scheduled = speculator.draft(scheduled, noise, spare, self._kv.try_grow)
        batch = flatten(scheduled, self._model.device)
        sampled = [each for each in scheduled if each.draws]
        with timer.compute:
            launched = self._runner.launch(batch, sampled, speculator.taps)
            with timer.draft:
                speculator.apply_feedback(hidden=launched.is_running)
            out = launched.wait()
        with timer.draft:
            accepted, logprobs = accept_drafts(sampled, out.tokens, out.logprobs)
            self._commit(scheduled, accepted)
        outputs = self._append(sampled, accepted, logprobs)
        with timer.draft:
            record = speculator.record(scheduled, accepted, out.features)
            self._on_idle()
        return _step_report(batch, out, outputs, record, timer)

    def _schedule(self) -> Sequence[Scheduled]:
        """Choose the step's requests; those with few tokens come first in the batch."""
        scheduled = sorted(self._scheduler.schedule(), key=lambda each: each.num_tokens)
        assert scheduled, "step() needs an unfinished request"
        return scheduled

    def _commit(self, scheduled: Sequence[Scheduled], accepted: Mapping[str, Accepted]) -> None:
        """Count tokens computed for good, and move accepted nodes to their slots in the KV.

        Requests without a draft take part: KV may have been reserved for a draft that was empty.
        """
        paths: list[KeptPath] = []
        for each in scheduled:
            active = each.active
            active.num_computed += each.num_tokens
            if active.request_id in accepted:
                path = accepted[active.request_id].path
                paths.append(
                    KeptPath(
                        request_id=active.request_id, num_tokens=active.num_computed, path=path
                    )
                )
                active.num_computed += len(path)
        self._kv.keep(paths)

    def _append(
        self,
        sampled: Sequence[Scheduled],
        accepted: Mapping[str, Accepted],
        logprobs: Mapping[str, Sequence[float]],
    ) -> StepOutputs:
        """Append each request's tokens up to one that ends it; remove requests that are done."""
        outputs = StepOutputs()
        for each in sampled:
            active, name = each.active, each.active.request_id
            start, before = len(active.tokens), len(active.logprobs)
            try:
                done = append_tokens(active, accepted[name].tokens, logprobs[name], self._decode)
            except Exception as error:  # noqa: BLE001 - it ends this request alone
                self._remove(active)
                outputs.failed.append(Failed(request_id=name, error=error))
                continue
            added = zip(active.tokens[start:], active.logprobs[before:], strict=True)
            outputs.emitted.extend(
                Emitted(request_id=name, token=token, logprob=logprob) for token, logprob in added
            )
            if done is not None:
                self._remove(active)
                outputs.finished.append(done)
        return outputs

    def _remove(self, active: ActiveRequest) -> None:
        """Remove an unfinished request everywhere."""
        del self._active[active.request_id]
        self._scheduler.withdraw(active)
        active.is_done = True
        self._speculator.forget(active)

    def _on_idle(self) -> None:
        if not self._active:
            self._speculator.on_idle()

    def generate(
        self,
        requests: Sequence[Request],
        on_step: Callable[[StepReport], None] | None = None,
    ) -> list[Completion]:
        """Run until the requests are finished; return their completions in the same order.

        Other requests in progress advance as well; `on_step` gets all reports. If anything raises,
        or one of the requests fails, the requests are aborted.
        """
        for request in requests:
            self.check(request)
        done: dict[str, Completion] = {}
        awaited = {request.request_id for request in requests}
        try:
            for request in requests:
                self.submit(request)
            while awaited:
                report = self.step()
                report.raise_failure(awaited)
                done.update((completion.request_id, completion) for completion in report.finished)
                awaited.difference_update(completion.request_id for completion in report.finished)
                if on_step is not None:
                    on_step(report)
        finally:
            for request in requests:
                if request.request_id in self._active:
                    self.abort(request.request_id)
        return [done[request.request_id] for request in requests]

    def stream(
        self, request: Request, on_step: Callable[[StepReport], None] | None = None
    ) -> Iterator[Piece | Completion]:
        """Yield the text of one request piece by piece, then its completion.

        The pieces concatenated are the completion's `text`, without any stop string.
        """
        name, reader = request.request_id, Reader(self._decode, request.sampling.stop)
        self.submit(request)
        try:
            while name in self._active:
                report = self.step()
                report.raise_failure({name})
                if on_step is not None:
                    on_step(report)
                own = [each.token for each in report.emitted if each.request_id == name]
                drafted = sum(
                    each.num_accepted for each in report.verified if each.request_id == name
                )
                for tokens, is_drafted in ((own[:drafted], True), (own[drafted:], False)):
                    if text := reader.feed(tokens):
                        yield Piece(text=text, drafted=is_drafted)
                for completion in report.finished:
                    if completion.request_id == name:
                        if text := reader.finish(completion.text):
                            yield Piece(text=text, drafted=False)
                        yield completion
        finally:  # also if the consumer stops reading
            if name in self._active:
                self.abort(name)

    def check(self, request: Request) -> None:
        """Raise RequestError if this engine can never serve the request; thread-safe."""
        longest = len(request.prompt_tokens) + request.sampling.max_tokens
        vocab_size = self._model.config.vocab_size
        if request.request_id in self._active:
            raise RequestError(f"request {request.request_id!r} is already in progress")
        if not request.prompt_tokens:
            raise RequestError(f"request {request.request_id!r} has an empty prompt")
        outside = [token for token in request.prompt_tokens if not 0 <= token < vocab_size]
        if outside:
            raise RequestError(
                f"request {request.request_id!r} holds token {outside[0]}, but the model's "
                f"vocabulary has {vocab_size}; use the model's own tokenizer"
            )
        if not -(2**63) <= request.noise_key < 2**63:
            raise RequestError(
                f"request {request.request_id!r} has noise_key {request.noise_key}, which is no "
                "signed 64-bit integer; make it with sampling.noise_key"
            )
        if longest > self._limits.max_len:
            raise RequestError(
                f"request {request.request_id!r} may reach {longest} tokens (prompt "
                f"{len(request.prompt_tokens)} + max_tokens {request.sampling.max_tokens}), over "
                f"the engine's {self._limits.max_len}; shorten it or raise the limit"
            )


def _step_report(
    batch: FlatBatch,
    out: RunnerOutput,
    outputs: StepOutputs,
    record: SpeculationRecord,
    timer: StepTimer,
) -> StepReport:
    return StepReport(
        num_tokens=len(batch.tokens),
        num_running=len(batch.segments),
        emitted=tuple(outputs.emitted),
        finished=tuple(outputs.finished),
        failed=tuple(outputs.failed),
        verified=record.verified,
        speculates=record.speculates,
        switch=record.switch,
        **timer.stop(forward_s=out.forward_s, sample_s=out.sample_s),
    )
