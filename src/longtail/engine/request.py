"""One request while the engine works on it: the only mutable thing the scheduler moves around."""

from dataclasses import dataclass, field

from longtail.types import Completion, FinishReason, Request


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request in progress.

    `tokens` is the prompt followed by what was generated. The KV of its first `num_computed` tokens
    is in the cache; the others are pending, and the last of them yields the next token. A preempted
    request forgets its KV (`num_computed` = 0), never its tokens.

        prompt p0 p1 p2 | generated g0 g1            num_computed = 4, pending = [g1]
        KV     x  x  x    x
    """

    request: Request
    tokens: list[int]
    policy_version: int
    logprobs: list[float] = field(default_factory=list)
    num_computed: int = 0
    is_done: bool = False
    """It has left the engine, whoever still refers to it."""

    @property
    def request_id(self) -> str:
        """Identifier of the request."""
        return self.request.request_id

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_tokens)

    @property
    def num_pending(self) -> int:
        """Tokens still to be computed before the next one can be drawn."""
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def generated(self) -> tuple[int, ...]:
        """Tokens drawn so far."""
        return tuple(self.tokens[self.prompt_len :])

    def complete(self, reason: FinishReason, text: str) -> Completion:
        """Make the record that leaves the engine."""
        return Completion(
            request_id=self.request_id,
            tokens=self.generated,
            logprobs=tuple(self.logprobs),
            text=text,
            finish_reason=reason,
            policy_version=self.policy_version,
        )
