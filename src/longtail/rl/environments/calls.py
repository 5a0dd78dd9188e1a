"""Calls of tools in a text, in the format of the model's chat template.

    hermes        <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    qwen3-coder   <function=add><parameter=a>1</parameter></function>
    llama3        {"name": "add", "parameters": {"a": 1}}, with <|python_tag|> before it or without

Calls within a thought do not count.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from longtail.errors import ConfigError, JsonError
from longtail.rl.grading.answers import after_thinking
from longtail.system.files import parse_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call. One with an error, which the model reads, cannot be made."""

    name: str = "unknown"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    is_text: bool = False
    """Whether the format writes arguments without types."""


def _json_call(text: str) -> Call:
    try:
        value = parse_json(text)
    except JsonError as error:
        return Call(error=f"The call is {error}.")
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return Call(error="The call has no name.")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return Call(name=name, error="The arguments of the call are not an object.")
    return Call(name=name, arguments=arguments)


def _hermes(text: str) -> Iterator[Call]:
    for found in re.finditer(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        yield _json_call(found[1].strip())


def _qwen3_coder(text: str) -> Iterator[Call]:
    parameter = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
    calls = re.findall(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", text, re.DOTALL)
    for name, body in calls:
        error = "The call holds more than parameters." if parameter.sub("", body).strip() else ""
        yield Call(name=name, arguments=dict(parameter.findall(body)), error=error, is_text=True)
    if "<tool_call>" in text and not calls:
        yield Call(error="The call has no <function=name>.")


def _llama3(text: str) -> Iterator[Call]:
    _, tag, text = text.rpartition("<|python_tag|>")
    if tag or re.match(r'\s*\{\s*"(name|type)"', text):
        for part in re.split(r"(?<=\})\s*;\s*(?=\{)", text):
            yield _json_call(part)


_FORMATS: Mapping[str, tuple[str, Callable[[str], Iterator[Call]]]] = {
    "qwen3-coder": (r"<function=.*<parameter=", _qwen3_coder),
    "hermes": (r'<tool_call>(\\n|\s)*\{\\*"name', _hermes),
    "llama3": (r'\{\\*"name\\*": function name, \\*"parameters', _llama3),
}
"""By name: the pattern of templates that ask for the format, and its parser."""


def format_of(template_source: str) -> str:
    """Return the format of calls that a chat template asks for; ConfigError if it is not known."""
    for name, (pattern, _) in _FORMATS.items():
        if re.search(pattern, template_source, re.DOTALL):
            return name
    raise ConfigError(
        "tokenizer.chat_template: it asks for calls of tools in none of the formats "
        f"{', '.join(_FORMATS)}; take a model with one of them, or an environment without tools"
    )


def parse(text: str, format: str) -> list[Call]:
    """Return the calls in a text, in order, with those that cannot be made."""
    return [*_FORMATS[format][1](after_thinking(text))]
