"""Turns of an episode as tokens: its prompt, and what the model reads after each turn.

The tokens of a turn are those that were sampled: nothing is decoded and encoded again. Behind them
comes what the chat template writes between an answer and the start of the next one. Without a chat
template observations are plain text.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from longtail.errors import ConfigError, DataError
from longtail.model.hf.chat import conversation
from longtail.model.hf.tokenizer import Tokenizer

Tokens = tuple[int, ...]
Message = Mapping[str, Any]

_QUESTION, _ANSWER, _OBSERVED = "3 + 4?", "Seven49", "Twelve94"
_FIRST = 3
"""Tokens behind an answer among which its end token is, which white space may precede."""


@final
class Turns:
    """Renders the turns of a tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        render: Callable[..., str] | None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Take `ChatTemplate.render` with a run's settings; None without a chat template."""
        self._tokenizer, self._render, self._tools = tokenizer, render, tools

    def check(self, roles: Sequence[str]) -> None:
        """Raise ConfigError if the chat template cannot show an observation of one of the roles."""
        for role in roles if self._render is not None else ():
            try:
                text = self._behind([{"role": role, "content": _OBSERVED}])
            except DataError as error:
                raise ConfigError(
                    f"environment.name: no turn can follow another with this model: {error}"
                ) from error
            if _OBSERVED not in text:
                raise ConfigError(
                    f"environment.name: the tokenizer's chat template writes no message of role "
                    f"{role!r} behind an answer; use a model whose template does"
                )

    def prompt(self, given: Any, opening: Sequence[Message]) -> tuple[str, Tokens]:
        """Return the text and tokens of a row's prompt with the environment's first messages.

        A first message of the user's is a part of the prompt's last one. Raises DataError.
        """
        messages = conversation(given, where="prompt")
        more = [dict(each) for each in opening]
        if more and messages and more[0]["role"] == messages[-1]["role"] == "user":
            joined = messages[-1]["content"] + more.pop(0)["content"]
            messages[-1] = {**messages[-1], "content": joined}
        messages += more
        if self._render is None:
            text = "".join(each["content"] for each in messages)
            return text, self._tokenizer.encode(text, add_special_tokens=True)
        text = self._render(messages, tools=self._tools)
        return text, self._tokenizer.encode(text)

    def observed(self, turn: Tokens, observation: Sequence[Message]) -> Tokens:
        """Return the tokens from the end of a turn to the start of the next one.

        A turn may have ended with the template's own end token, which does not come twice.
        """
        text = "".join(each["content"] for each in observation)
        if self._render is not None:
            text = self._behind(observation)
        tokens = self._tokenizer.encode(text, goes_on=True)
        ended = turn[-1] if turn and turn[-1] in self._tokenizer.eos_ids else None
        return tokens[tokens.index(ended) + 1 :] if ended in tokens[:_FIRST] else tokens

    def _behind(self, observation: Sequence[Message]) -> str:
        """Return what the chat template writes behind an answer that these messages follow."""
        assert self._render is not None, "there is a chat template"
        question = {"role": "user", "content": _QUESTION}
        messages = [question, {"role": "assistant", "content": _ANSWER}, *observation]
        return self._render(messages, tools=self._tools).rpartition(_ANSWER)[2]
