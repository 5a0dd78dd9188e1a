"""The index of running requests by the beginnings of their prompts, for sharing KV.

Prompts of one task begin alike: a chat template, a system prompt, examples. The KV of a beginning
depends on its tokens alone, so one request computes it and the others start with it.

    prompt  [ 16 tokens ][ 16 tokens ][ 9 ]      hashed: 16 and 32 tokens, and all 41 with the
                                                 group, which may share a shorter prompt, too

A beginning is found by its longest hash, then compared token by token, and beyond that hash.
"""

from typing import final

from longtail.engine.request import ActiveRequest


@final
class PrefixIndex:
    """The running requests."""

    def __init__(self) -> None:
        self._users: dict[int, dict[ActiveRequest, None]] = {}
        """Requests by hash of a beginning, the oldest first."""

    def add(self, active: ActiveRequest) -> None:
        """Add a request that starts to run."""
        for _, key in active.beginnings:
            self._users.setdefault(key, {})[active] = None

    def remove(self, active: ActiveRequest) -> None:
        """Remove a request that no longer runs."""
        for _, key in active.beginnings:
            users = self._users[key]
            del users[active]
            if not users:
                del self._users[key]

    def longest(self, active: ActiveRequest) -> tuple[int, ActiveRequest | None]:
        """Return the longest shared beginning in tokens, and the oldest running request with it.

        That request may not have computed it yet. The last token of a text is never shared: it is
        computed, to draw the next one.
        """
        most = len(active.tokens) - 1
        for size, key in reversed(active.beginnings):
            num_tokens = min(size, most)
            own = active.tokens[:num_tokens]
            for user in self._users.get(key, ()) if num_tokens else ():
                if user.tokens[:num_tokens] == own:
                    return _extended(num_tokens, active, user), user
        return 0, None


def _extended(num_tokens: int, active: ActiveRequest, user: ActiveRequest) -> int:
    """Return the number of equal tokens at the beginning, of which `num_tokens` are known."""
    own = active.tokens[num_tokens : min(active.prompt_len, len(active.tokens) - 1)]
    for token, other in zip(own, user.request.prompt_tokens[num_tokens:], strict=False):
        if token != other:
            break
        num_tokens += 1
    return num_tokens
