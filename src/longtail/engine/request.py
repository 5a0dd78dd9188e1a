"""A request in progress, which the scheduler moves, and the limits of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from longtail.errors import RequestError
from longtail.generator import Generator
from longtail.sampling import completion_key
from longtail.speculation.drafter import Draftable
from longtail.types import Request, SamplingParams

_STEP_TOKENS = 512
PREFIX_BLOCK = 16
"""Fewest tokens of KV that requests of different groups share."""


def requests_of(
    call: int, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, seed: int, n: int
) -> list[Request]:
    """Return the requests of a call for `n` completions of each prompt, which share its KV."""
    return [
        Request(
            request_id=f"{call}-{place}#{index}",
            prompt_tokens=prompt,
            noise_key=completion_key(seed, index),
            sampling=sampling,
            group_id=f"{call}-{place}",
        )
        for place, prompt in enumerate(prompts)
        for index in range(n)
    ]


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request in progress.

    `tokens` is the prompt followed by the generated tokens. The KV of its first `num_computed`
    tokens is in the cache; the others are pending, and the last of them yields the next token. A
    preempted request loses its KV (`num_computed` = 0), never its tokens.

        prompt p0 p1 p2 | generated g0 g1            num_computed = 4, pending = [g1]
        KV     x  x  x    x
    """

    request: Request
    tokens: list[int]
    policy_version: int
    logprobs: list[float] = field(default_factory=list)
    num_computed: int = 0
    is_done: bool = False
    """Whether the request has left the engine."""
    is_finished: bool = False
    """Whether its completion has ended."""
    beginnings: tuple[tuple[int, int], ...] = field(init=False)
    """Number of tokens and hash of each beginning of the prompt whose KV may be shared; see
    `scheduler.PrefixIndex`."""

    def __post_init__(self) -> None:
        """Hash the beginnings of the prompt, the shortest first."""
        prompt, group = self.request.prompt_tokens, self.request.group_id
        found, key = [], 0
        for end in range(PREFIX_BLOCK, len(prompt) + 1, PREFIX_BLOCK):
            key = hash((key, prompt[end - PREFIX_BLOCK : end]))
            found.append((end, key))
        if group:
            found.append((len(prompt), hash((group, prompt))))
        self.beginnings = tuple(found)

    @property
    def request_id(self) -> str:
        """Identifier of the request."""
        return self.request.request_id

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt_tokens)

    @property
    def num_pending(self) -> int:
        """Number of tokens to be computed before the next one can be drawn."""
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def generated(self) -> tuple[int, ...]:
        """Generated tokens."""
        return tuple(self.tokens[self.prompt_len :])

    def draftable(self, max_depth: int) -> Draftable:
        """Return the request as drafters see it."""
        return Draftable(
            request_id=self.request_id,
            tokens=self.tokens,
            prompt_len=self.prompt_len,
            sampling=self.request.sampling,
            max_depth=max_depth,
        )


class ActiveRequests(Generator):
    """A generator with the table of its requests in progress, from which engines derive."""

    def __init__(self, policy_version: int = 0) -> None:
        self._policy_version = policy_version
        self._active: dict[str, ActiveRequest] = {}

    @property
    def policy_version(self) -> int:
        """Version of the present weights."""
        return self._policy_version

    def unfinished(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Return (id, tokens so far, prompt length) of each unfinished request; thread-safe."""
        return [
            (request_id, tuple(active.tokens), active.prompt_len)
            for request_id, active in list(self._active.items())
        ]

    @property
    def num_unfinished(self) -> int:
        """Number of waiting and running requests."""
        return len(self._active)

    def is_unfinished(self, request_id: str) -> bool:
        """Return whether the request waits or runs."""
        return request_id in self._active

    def save_drafter(self, path: Path) -> None:
        """Do nothing: its drafters learn from what the loop reads."""

    def _check(self, request: Request, vocab_size: int, max_len: int) -> None:
        """Raise RequestError for a request in progress, or one beyond these limits."""
        if request.request_id in self._active:
            raise RequestError(f"request {request.request_id!r} is already in progress")
        request.check(vocab_size, max_len)

    def _in_progress(self, request_id: str) -> ActiveRequest:
        """Return an unfinished request; RequestError if there is none of this id."""
        if request_id not in self._active:
            raise RequestError(f"request {request_id!r} is not in progress")
        return self._active[request_id]

    def _begin(self, request: Request) -> ActiveRequest:
        """Add a checked request to the table, and return it."""
        active = ActiveRequest(
            request=request, tokens=[*request.prompt_tokens], policy_version=self._policy_version
        )
        self._active[request.request_id] = active
        return active

    def _refuse_unless_idle(self, version: int) -> None:
        """Raise RequestError if a request is in progress, since a completion is of one policy."""
        if self._active:
            raise RequestError(
                f"{self.num_unfinished} requests are unfinished: finish or abort them before "
                f"policy version {version} is loaded"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of one engine."""

    max_running: int
    max_step_tokens: int
    """Maximum number of flat tokens in a step; at least `max_running`."""
    max_len: int
    """Maximum number of tokens of prompt plus completion."""
    kv_tokens: int = 0
    """Tokens of KV memory; 0: enough for `max_running` requests of `max_len`."""

    @staticmethod
    def of(max_running: int, max_len: int, kv_tokens: int = 0) -> "EngineLimits":
        """Return limits with steps of at most 512 tokens, or as many as requests run."""
        return EngineLimits(
            max_running=max_running,
            max_step_tokens=max(_STEP_TOKENS, max_running),
            max_len=max_len,
            kv_tokens=kv_tokens,
        )

    def __post_init__(self) -> None:
        """Refuse limits with which the engine could stall."""
        for name, value, least in (
            ("max_running", self.max_running, 1),
            ("max_len", self.max_len, 1),
            ("kv_tokens", self.kv_tokens, 0),
        ):
            if value < least:
                raise RequestError(f"rollout.{name} = {value}: it must be at least {least}")
        if 0 < self.kv_tokens < self.max_len:
            raise RequestError(
                f"rollout.kv_tokens = {self.kv_tokens} cannot hold one request of {self.max_len} "
                "tokens (prompt and completion); raise it, or set 0 to size it by max_running"
            )
