"""Chat templates: messages to the text of a prompt, for everything that renders a chat.

`ChatTemplate.render` maps names of roles, adds the system prompt, gives tools and the time to the
template, continues an assistant's message, and refuses what the template leaves out.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, final

from longtail.errors import DataError, JsonError
from longtail.system.files import parse_json

Messages = list[dict[str, Any]]

_ROLES = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant")}
"""Roles by the names that data sets give them."""
_SYSTEM = {"system": "system", "developer": "system"}
"""Roles of a first message that instructs."""
_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tag that transformers adds to Jinja."""
_GIVEN = ("messages", "raise_exception", "strftime_now", "loop", "caller", "varargs", "kwargs")
THINK, END_THINK = "<think>", "</think>"
_BEGUN = re.compile(rf"({THINK}\s*)?({END_THINK}\s*)?\Z")
"""A thought at the end of a prompt: open, or closed and empty."""


def opens_thought(prompt: str) -> bool:
    """Return whether the text that a model reads ends with the tag that opens a thought."""
    return prompt.rstrip().endswith(THINK)


def conversation(prompt: Any, *, where: str) -> Messages:
    """Return a prompt as messages; a text is the user's. Raises DataError for anything else.

    Messages in ShareGPT's form have `from` and `value`. Fields without a value are left out, and
    arguments of tool calls may be JSON.

    Example: [{"from": "gpt", "value": "hi"}] is [{"role": "assistant", "content": "hi"}]
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    found = Messages()
    for message in prompt if isinstance(prompt, list) else [None]:
        fields = dict(message) if isinstance(message, Mapping) else {}
        if {"from", "value"} <= fields.keys() and "role" not in fields:
            fields |= {"role": fields.pop("from"), "content": fields.pop("value")}
        fields = {name: value for name, value in fields.items() if value not in (None, [], {})}
        role, calls = fields.get("role"), fields.get("tool_calls", [])
        content = fields.get("content", "" if calls else None)
        content = fields["content"] = join_parts(content) if isinstance(content, list) else content
        is_called = isinstance(calls, list) and all(map(tool_name, calls))
        if not (isinstance(role, str) and isinstance(content, str) and is_called):
            raise DataError(
                f"{where}: the prompt is {type(prompt).__name__} {prompt!r:.80}, expected text or "
                "a list of messages like {'role': 'user', 'content': '...'}"
            )
        if calls:
            fields["tool_calls"] = [_with_object(call) for call in calls]
        found.append({**fields, "role": _ROLES.get(role, role)})
    return found


def join_parts(parts: Sequence[Any]) -> str | None:
    """Return the text of a message's parts in OpenAI's form; None if one of them is no text.

    Example: join_parts([{"type": "text", "text": "hi"}]) == "hi"
    """
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ]
    return "".join(texts) if len(texts) == len(parts) else None


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are an object: OpenAI writes JSON, which templates quote."""
    if isinstance(inner := call.get("function"), Mapping):
        return {**call, "function": _with_object(inner)}
    try:
        value = parse_json(call["arguments"])
    except (KeyError, TypeError, JsonError):
        return dict(call)
    return {**call, "arguments": value if isinstance(value, dict) else call["arguments"]}


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
        from jinja2 import Environment, TemplateError, nodes  # graders need none of it

        environment, found = Environment(extensions=["jinja2.ext.loopcontrols"]), set[str]()
        template = self._inner.chat_template or {}
        for each in [template] if isinstance(template, str) else template.values():
            with suppress(TemplateError, RecursionError, ValueError):  # rendering refuses it
                tree = environment.parse(_GENERATION.sub("", each))
                first = dict[str, str]()
                for name in _names(tree):
                    first.setdefault(name.name, name.ctx)
                found |= {name for name, context in first.items() if context == "load"}
                found -= {macro.name for macro in tree.find_all(nodes.Macro)}
        taken = set(inspect.signature(self._inner.apply_chat_template).parameters)
        taken = taken - {"tools", "documents"} | {*_GIVEN, *self._inner.special_tokens_map}
        return frozenset(found - taken - environment.globals.keys())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
        system_prompt: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> str:
        """Apply the chat template to messages, up to where the assistant writes on.

        That is the start of its answer, or the end of its message if that is the last one. Without
        `generation_prompt` the text ends after the last message. `system_prompt` stands before
        messages that do not begin with one of their own. `arguments` are values of the property of
        that name, and `now` is the time that the template may write; None is the present.

        Raises DataError if there is no chat template, if it refuses the messages, or if it leaves
        out a message, a call or a tool. A message of role `developer` that it leaves out or refuses
        is a system message.
        """
        if self.source is None:
            raise DataError(
                "tokenizer.chat_template is missing but the prompts are chat messages: add a "
                "chat_template.jinja to the model directory, or give prompts as plain text"
            )
        chat = conversation(list(messages), where="messages")
        named = ""
        if system_prompt is not None and chat[:1] and chat[0]["role"] not in _SYSTEM:
            chat = [{"role": "system", "content": system_prompt}, *chat]
            named = f"data.system_prompt = {system_prompt!r:.80}: "
        chats = [chat]
        if any(each["role"] == "developer" for each in chat):
            chats.append(
                [each | {"role": _SYSTEM.get(each["role"], each["role"])} for each in chat]
            )
        given = {**(arguments or {}), **({"tools": list(tools)} if tools else {})}
        problem, cause = None, None
        for chat in chats:
            try:
                text = self._apply(chat, given, generation_prompt, now or datetime.now())
                problem, cause = _left_out(text, chat, tools or ()), None
            except Exception as error:  # noqa: BLE001 - a template is a program: any error
                roles, cause = [each["role"] for each in chat], error
                problem = f"refuses messages with roles {roles}: {error}{self._needs(error, given)}"
            if problem is None:
                return text
        raise DataError(
            f"{named}tokenizer.chat_template {problem}; change the messages or the template"
        ) from cause

    def _apply(
        self, chat: Messages, given: Mapping[str, Any], generation_prompt: bool, now: datetime
    ) -> str:
        template, tools = self._inner.chat_template, given.get("tools")
        usable = {"default", "tool_use"} if tools else {"default"}
        if isinstance(template, dict) and not usable & template.keys():
            raise ValueError(f"none of its templates, {', '.join(template)}, is called default")
        source = self._inner.get_chat_template(None, tools or None)
        source = _NOW.sub(lambda found: json.dumps(now.strftime(found[2])), source)
        apply = partial(
            self._inner.apply_chat_template, chat_template=source, tokenize=False, **given
        )
        if not generation_prompt or not chat or chat[-1]["role"] != "assistant":
            return apply(chat, add_generation_prompt=generation_prompt)
        begun = chat[-1]["content"].lstrip()
        if not begun.startswith(THINK) or THINK not in source:
            return apply(chat, continue_final_message=True)
        # Templates move or drop thoughts of messages, and the prompt of an answer may begin one
        return _BEGUN.sub("", apply(chat[:-1], add_generation_prompt=True)) + begun

    def _needs(self, error: Exception, given: Mapping[str, Any]) -> str:
        """Return which argument of the template is missing, if that is why it fails."""
        text = str(error).replace("'NoneType' object is not iterable", "'tools' is undefined")
        names = sorted(self.arguments - given.keys())
        named = [name for name in names if f"'{name}' is undefined" in text]
        remedy = "and none are given; for rows data.chat_template_kwargs has them"
        return f" (it reads {named[0]}, {remedy})" if named else ""


def _names(node: Any) -> Iterator[Any]:
    """Yield the names in a Jinja tree as they are evaluated, those in macros last."""
    from jinja2 import nodes

    children = list(node.iter_child_nodes())
    if isinstance(node, nodes.Assign | nodes.AssignBlock):  # a value is read before it has a name
        children.reverse()
    for child in sorted(children, key=lambda each: isinstance(each, nodes.Macro)):
        yield from _names(child)
    if isinstance(node, nodes.Name):
        yield node


def _left_out(
    text: str, chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return what of messages and tools the template left out of a text; None if nothing.

    The contents must come in the order of the messages, but for those of system messages, without
    white space at their ends, as they are or within JSON. Thoughts may be left out.
    """
    for tool in tools:
        if tool_name(tool) not in text:
            return f"leaves out the tool {tool_name(tool)!r}"
    place = 0
    for message in chat:
        role, content = message["role"], message["content"]
        start = 0 if role == "system" else place
        if role == "assistant":
            content = content.rpartition(END_THINK)[2]
        written = content.strip()
        forms = (written, json.dumps(written, ensure_ascii=False)[1:-1])
        ends = [at + len(form) for form in forms if (at := text.find(form, start)) >= 0]
        if not ends:
            return f"leaves out the content of a message with role {role!r}: {written!r:.80}"
        calls = message.get("tool_calls", ())
        for call in calls:
            if text.find(tool_name(call), start) < 0:
                return (
                    f"leaves out the tool call {tool_name(call)!r} of a message with role {role!r}"
                )
        if role != "system" and not calls:  # beside calls a content may stand behind their results
            place = min(ends)
    return None


def tool_name(tool: Any) -> str:
    """Return the name of a tool, or of a call of one; empty if it has none."""
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else ""


def tool_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function for templates, from its annotations and docstring.

    Raises transformers' errors for a function whose arguments lack either.
    """
    # Imported here, as it takes seconds that graders need not wait.
    from transformers.utils import chat_template_utils as theirs

    # No tool takes a tensor, and torch takes seconds more.
    vars(theirs)["is_torch_available"] = lambda: False
    return theirs.get_json_schema(tool)
