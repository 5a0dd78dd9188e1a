"""Limits of one engine."""

from dataclasses import dataclass

from longtail.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of one engine.

    Example: EngineLimits(max_running=64, max_step_tokens=512, kv_tokens=0, max_len=2560)
    """

    max_running: int
    max_step_tokens: int
    """Maximum number of flat tokens in a step; at least `max_running`."""
    max_len: int
    """Maximum number of tokens of prompt plus completion."""
    kv_tokens: int = 0
    """Tokens of KV memory; 0: enough for `max_running` requests of `max_len`, or all that fits."""
    reserved_bytes: int = 0
    """Bytes of GPU memory that stay free for other uses in this process."""

    def __post_init__(self) -> None:
        """Refuse limits with which the engine could stall."""
        for name, value, least in (
            ("max_running", self.max_running, 1),
            ("max_len", self.max_len, 1),
            ("kv_tokens", self.kv_tokens, 0),
        ):
            if value < least:
                raise RequestError(f"rollout.{name} = {value}: it must be at least {least}")
        if self.max_step_tokens < self.max_running:
            raise RequestError(
                f"rollout.max_step_tokens = {self.max_step_tokens} is below rollout.max_running = "
                f"{self.max_running}: every running request needs a token a step; raise it"
            )
        if 0 < self.kv_tokens < self.max_len:
            raise RequestError(
                f"rollout.kv_tokens = {self.kv_tokens} cannot hold one request of {self.max_len} "
                "tokens (prompt and completion); raise it, or set 0 to size it by max_running"
            )
