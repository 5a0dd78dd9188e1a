"""Chat templates: messages to text, through transformers' sandbox."""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, final

from longtail.errors import DataError


@final
class ChatTemplate:
    """The chat template of a tokenizer, which may have none."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner  # transformers' PreTrainedTokenizerBase

    @property
    def source(self) -> str | None:
        """Source of the template; None if there is none."""
        template = self._inner.chat_template
        return template if template is None or isinstance(template, str) else json.dumps(template)

    @property
    def arguments(self) -> frozenset[str]:
        """Names that the chat template reads and a caller may set, as `enable_thinking`."""
        taken = set(inspect.signature(self._inner.apply_chat_template).parameters)
        taken = taken - {"tools", "documents"} | {"messages", *self._inner.special_tokens_map}
        template = self._inner.chat_template
        if template is None:
            return frozenset()
        several = [template] if isinstance(template, str) else template.values()
        return frozenset().union(*map(_variables, several)) - taken

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Apply the chat template to messages, up to the start of the assistant's answer.

        Without `generation_prompt` the text ends after the last message. `arguments` are values of
        the property of that name. Raises DataError if there is no chat template or if it refuses
        the messages.
        """
        if self.source is None:
            raise DataError(
                "tokenizer.chat_template is missing but the prompts are chat messages: add a "
                "chat_template.jinja to the model directory, or give prompts as plain text"
            )
        conversation = [dict(message) for message in messages]
        try:
            return self._inner.apply_chat_template(
                conversation,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **(arguments or {}),
            )
        except Exception as error:  # a template is a program and can raise any error
            roles = [message.get("role") for message in conversation]
            raise DataError(
                f"tokenizer.chat_template refuses messages with roles {roles}: {error}; change "
                "the messages or the template"
            ) from error


def _variables(template: str) -> frozenset[str]:
    """Return the variables that a template reads and does not set; none of a malformed one.

    Example: "{% set x = 1 %}{{ x }}{{ messages }}{{ raise_exception('no') }}" reads messages.
    """
    from jinja2 import Environment, TemplateError, meta

    source = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)  # transformers' own tag
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except (TemplateError, RecursionError, ValueError):
        return frozenset()
    return frozenset(meta.find_undeclared_variables(tree)) - {"raise_exception", "strftime_now"}
