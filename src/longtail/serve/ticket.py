"""One completion of a call, from the time it is taken on until its caller has it whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from longtail.engine.report import Emitted, Verified
from longtail.engine.text import Reader
from longtail.errors import CompletionError
from longtail.serve.stream import Chunk, Ending, Generation
from longtail.types import Completion, Request


@dataclass(slots=True, eq=False)
class Ticket:
    """Read and written by the engine's thread while it has it, by nobody else then.

    An engine that fails is replaced, and its successor writes the text again from its beginning.
    The text is a function of the request, so what its caller was told is passed over.
    """

    request: Request
    generation: Generation
    choice: int
    reader: Reader
    came: float
    first: float = 0.0
    """When its first token was written; 0: not yet."""
    num_failures: int = 0
    """Engines that failed while they wrote it."""
    told: list[int] = field(default_factory=list)
    """Tokens that its caller has."""
    num_again: int = 0
    """Of them, those that the present engine has written again."""
    num_drafted: int = 0
    num_accepted: int = 0
    num_verified: int = 0

    @property
    def name(self) -> str:
        """Id of its request."""
        return self.request.request_id

    def begin_again(self) -> None:
        """Expect the text from its beginning."""
        self.num_again = self.num_drafted = self.num_accepted = self.num_verified = 0

    def verified(self, step: Verified) -> None:
        """Count what drafting did for it in a step."""
        self.num_verified += 1
        self.num_drafted += step.num_drafted
        self.num_accepted += step.num_accepted

    def chunk(self, emitted: Sequence[Emitted], completion: Completion | None) -> Chunk | None:
        """Return what a step wrote that its caller does not have; None if that is nothing.

        Raises CompletionError where a text that is written again becomes another one, which only
        computations that depend on their batch can do.
        """
        again = self.told[self.num_again : self.num_again + len(emitted)]
        if again != [each.token for each in emitted[: len(again)]]:
            raise CompletionError(
                "the engine was started again and wrote another text; ask for this one anew"
            )
        self.num_again += len(again)
        news = emitted[len(again) :]
        if not news:
            return None
        tokens = [each.token for each in news]
        text, ending = self.reader.feed(tokens), None
        if completion is not None:
            text += self.reader.finish(completion.text)
            ending = Ending(
                reason=completion.finish_reason,
                num_tokens=len(completion.tokens),
                num_drafted=self.num_drafted,
                num_accepted=self.num_accepted,
                num_verified=self.num_verified,
            )
        self.told += tokens
        self.num_again += len(tokens)
        return Chunk(
            choice=self.choice,
            text=text,
            tokens=tuple(tokens),
            logprobs=tuple(each.logprob for each in news),
            ending=ending,
        )
