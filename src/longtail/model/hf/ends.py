"""End tokens of completions, and what the chat template writes after an answer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from longtail.errors import DataError, RequestError
from longtail.model.hf.chat import ChatTemplate
from longtail.model.hf.detokenizer import silent_tokens
from longtail.types import SamplingParams

_QUESTION = {"role": "user", "content": "3 + 4?"}
_ANSWER = "Seven49"
"""Answer that is looked for in a rendered conversation."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Ends of the texts of a model, from its tokenizer, files and chat template.

    Example: of Gemma 3, Ends(ids=(1, 106), turn="<end_of_turn>", turn_id=106, special={...})
    """

    ids: tuple[int, ...]
    """Tokens that end a text. The first is the tokenizer's own, which ends plain texts."""
    turn: str
    """Text that the chat template writes behind an answer, up to its end token."""
    turn_id: int | None
    """Token with which `turn` ends; None if the template writes none there."""
    special: Mapping[str, int]
    """Special tokens that are left out of decoded texts."""

    @staticmethod
    def of(inner: Any, listed: tuple[int, ...]) -> "Ends":
        """Find the ends of a tokenizer of transformers, of whose model the files list some."""
        known = [token for token in listed if inner.convert_ids_to_tokens(token) is not None]
        added, text = inner.added_tokens_decoder, _behind_answer(inner)
        last, inside = (
            [token for token in inner.encode(each, add_special_tokens=False) if token in added]
            for each in (text, _behind_answer(inner, _QUESTION))
        )
        # GLM's turn ends where the next one begins
        found = [*filter(known.__contains__, last), *last, *filter(known.__contains__, inside)]
        turn_id = next(iter(found), None)
        if turn_id is not None:
            name = added[turn_id].content
            text = text.partition(name)[0] + name
        ids = tuple(dict.fromkeys(each for each in (*known, turn_id) if each is not None))
        return Ends(
            ids=ids,
            turn=text,
            turn_id=turn_id,
            special=silent_tokens(inner, ids),
        )

    def cut(self, text: str) -> str:
        """Return the text of an answer through its end; without one, without blanks behind it."""
        place = text.rfind(self.turn)
        return (text if place < 0 else text[: place + len(self.turn)]).rstrip()

    def stopping(self, params: SamplingParams) -> SamplingParams:
        """Return parameters that stop at `ids`, unless they name ids, and at all stop strings.

        One that is a special token stops by its id. Raises RequestError for one that holds a
        special token among other text, which no decoded text does.
        """
        ids = list(params.stop_token_ids or self.ids)
        for stop in params.stop:
            if stop.strip() in self.special:
                ids.append(self.special[stop.strip()])
            elif held := next((name for name in self.special if name in stop), None):
                raise RequestError(
                    f"stop = {stop!r}: texts are without the special token {held!r}, so this never "
                    "matches; give the token alone"
                )
        return replace(params, stop_token_ids=tuple(dict.fromkeys(ids)))


def _behind_answer(inner: Any, *more: Mapping[str, str]) -> str:
    """Return what the chat template writes behind an answer, without white space around it."""
    messages = [_QUESTION, {"role": "assistant", "content": _ANSWER}, *more]
    try:
        text = ChatTemplate(inner).render(messages, generation_prompt=False)
    except DataError:  # there is none, or it needs more than messages
        return ""
    _, found, behind = text.rpartition(_ANSWER)
    return behind.strip() if found else ""
