"""The record of an episode in progress."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from longtail.engine.text import Decode
from longtail.types import Completion, Episode, FinishReason, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of an episode; `SamplingParams.max_tokens` bounds what it generates."""

    max_turns: int
    max_observed: int
    """Most tokens of all observations."""
    max_len: int
    """Most tokens of everything."""


@dataclass(slots=True, kw_only=True)
class RunningEpisode:
    """An episode in progress."""

    request: Request
    prompt: tuple[int, ...] = ()
    prompt_text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Finished turns and observations."""
    logprobs: list[float] = field(default_factory=list)
    observed: list[tuple[int, int]] = field(default_factory=list)
    messages: list[Mapping[str, str]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    num_turns: int = 0
    last_turn: int = 0
    """Place of the newest turn in `tokens`."""
    last: Completion | None = None
    """The newest turn."""
    num_calls: int = 0
    num_bad_calls: int = 0
    asked: float = 0.0
    """Time of the newest question to the environment."""
    waited_s: float = 0.0
    is_closing: bool = False
    """Whether it is cut, and the environment was asked for its reward."""

    @property
    def turn_id(self) -> str:
        """Id of the request of the present turn."""
        return f"{self.request.request_id}/{self.num_turns}"

    @property
    def num_observed(self) -> int:
        """Number of tokens of all observations."""
        return sum(end - begin for begin, end in self.observed)

    def left(self, max_len: int, num_observed: int = 0) -> int:
        """Return the most tokens that can still be written, after `num_observed` others."""
        generated = len(self.tokens) - self.num_observed
        room = max_len - len(self.prompt) - len(self.tokens) - num_observed
        return min(self.request.sampling.max_tokens - generated, room)

    def completion(
        self, decode: Decode, policy_version: int, reason: FinishReason, problem: str
    ) -> Completion:
        """Return all turns."""
        tokens = tuple(self.tokens)
        if self.last is not None and tokens[self.last_turn :] == self.last.tokens:
            text = decode(tokens[: self.last_turn]) + self.last.text
        else:
            text = decode(tokens)
        return Completion(
            request_id=self.request.request_id,
            tokens=tokens,
            logprobs=tuple(self.logprobs),
            text=text,
            finish_reason=reason,
            policy_version=policy_version,
            episode=Episode(
                prompt_tokens=self.prompt or self.request.prompt_tokens,
                prompt=self.prompt_text,
                observed=tuple(self.observed),
                messages=tuple(self.messages),
                rewards=tuple(self.rewards),
                num_calls=self.num_calls,
                num_bad_calls=self.num_bad_calls,
                waited_s=self.waited_s,
                problem=problem,
            ),
        )
