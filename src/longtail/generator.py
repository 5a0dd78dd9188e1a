"""The interface of engines: requests in, completions out, step by step.

    submit --> step, step, step ... --> StepReport: tokens, finished completions, verified drafts
    load_policy    between two rollouts: a text is of one policy
    load_drafter   between two steps: a drafter changes the speed, never a text

`engine.RolloutEngine` is longtail's own generator, `vllm.generator` has vLLM's. Laws 1 to 6 and 10
(docs/architecture.md) hold for each.
"""

import abc
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from longtail.types import Completion, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """One emitted token."""

    request_id: str
    token: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Result of one verified draft."""

    request_id: str
    position: int
    """Number of generated tokens before the step."""
    num_drafted: int
    depth: int
    """Depth of the deepest node."""
    num_accepted: int
    turn: int = 0
    """Number of turns of its episode before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A request that ended with an exception; all other requests continue."""

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A change between drafting and plain decoding from this step on (the guard: the next)."""

    drafts: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step of a generator. Seconds of a part that it does not measure are NaN."""

    num_tokens: int
    """Number of computed flat tokens, drafts included."""
    num_running: int
    step_s: float
    forward_s: float
    """Seconds of decoder and LM head."""
    sample_s: float
    """Seconds of draws, with their noise."""
    emitted: tuple[Emitted, ...]
    finished: tuple[Completion, ...]
    failed: tuple[Failed, ...] = ()
    draft_s: float = 0.0
    """Seconds of the drafters: observing, proposing, with their forward passes, and learning."""
    draft_forward_s: float = 0.0
    """Seconds of the drafters' forward passes."""
    verified: tuple[Verified, ...] = ()
    """Results of the verified drafts."""
    tuner_s: float = 0.0
    """Seconds of planning, and of learning from the previous step."""
    speculates: bool = False
    """Whether the engine has drafters, in a plain step, too."""
    switch: Switch | None = None

    def raise_failure(self, awaited: Container[str]) -> None:
        """Raise the error of the first awaited request that failed, if any."""
        for each in self.failed:
            if each.request_id in awaited:
                raise each.error


class Generator(abc.ABC):
    """Writes completions, step by step, under one policy at a time. One thread calls it."""

    @property
    @abc.abstractmethod
    def policy_version(self) -> int:
        """Version of the present weights."""

    @abc.abstractmethod
    def check(self, request: Request) -> None:
        """Raise RequestError if this generator can never serve the request; thread-safe."""

    @abc.abstractmethod
    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError as `check`."""

    @abc.abstractmethod
    def abort(self, request_id: str) -> None:
        """Remove an unfinished request. Raises RequestError if there is none of this id."""

    @abc.abstractmethod
    def step(self) -> StepReport:
        """Advance the unfinished requests, of which there is one at least.

        An error of one request ends that request only, see `StepReport.failed`. After any other
        exception the generator must not be used again.
        """

    @abc.abstractmethod
    def unfinished(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Return (id, tokens so far, prompt length) of each unfinished request; thread-safe."""

    @abc.abstractmethod
    def load_policy(self, version: int, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Take all weights of a policy, by Hugging Face's names; no request may be in progress.

        Each is read before the next is taken. Raises RequestError if requests are unfinished or
        the weights are of another model.
        """

    @abc.abstractmethod
    def load_drafter(self, tensors: Mapping[str, Tensor]) -> None:
        """Draft with other weights from the next step on; `tensors` as in `DrafterWeights`."""

    @abc.abstractmethod
    def save_drafter(self, path: Path) -> None:
        """Write the drafter that it learns by itself; nothing if there is none."""

    @abc.abstractmethod
    def sleep(self) -> None:
        """Free memory while idle, where later requests are not slowed."""

    def close(self) -> None:  # noqa: B027
        """End what it started beside itself: nothing, unless a generator says what."""

    @property
    @abc.abstractmethod
    def num_unfinished(self) -> int:
        """Number of waiting and running requests."""

    @abc.abstractmethod
    def is_unfinished(self, request_id: str) -> bool:
        """Return whether the request waits or runs."""

    def generate(
        self,
        requests: Sequence[Request],
        on_step: Callable[[StepReport], None] | None = None,
    ) -> list[Completion]:
        """Run until the requests are finished; return their completions in the same order.

        Other requests in progress advance as well; `on_step` gets all reports. Requests that
        `on_step` aborts are left out. If anything raises, or one of the requests fails, the
        requests are aborted.
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
                if on_step is not None:
                    on_step(report)
                awaited = {name for name in awaited if self.is_unfinished(name)}
        finally:
            for request in requests:
                if self.is_unfinished(request.request_id):
                    self.abort(request.request_id)
        return [done[request.request_id] for request in requests if request.request_id in done]
