"""One interface for environments of all kinds, inside the environment's process.

    text environments   reset(**row) -> str | messages | None; step(text) -> (observation, reward,
                        done), or gymnasium's five
    TRL's classes       reset(**row) -> str | None; public methods are tools; get_reward(); the
                        first text without a call ends the episode
    functions           tools alone, or beside either

No torch, unless the environment imports it.
"""

import asyncio
import inspect
import random
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from longtail.errors import ConfigError, GradingError, JsonError, LongtailError, describe
from longtail.model.hf.chat import join_parts, tool_schema
from longtail.rl.environments.adapters import ADAPTERS
from longtail.rl.environments.calls import Call, parse
from longtail.rl.grading.answers import checked_number
from longtail.rl.grading.reward import awaited
from longtail.system.files import parse_json
from longtail.system.machine import named_callable

ROLES = ("user", "tool", "system")
_MAX_CHARACTERS = 4 * 2**20
"""Longest message; no engine can read the rest of a longer one."""
_NO_TOOLS = frozenset({"reset", "get_reward", "close"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer of an environment to a text, or the beginning of an episode."""

    messages: tuple[Mapping[str, str], ...] = ()
    """Messages that the model reads next: `role`, which is user, tool or system, and `content`."""
    reward: float = 0.0
    done: bool = False
    calls: int = 0
    """Calls of tools in the text that is answered."""
    bad_calls: int = 0
    """Calls that did not parse, named no tool, or raised."""


def is_message(value: Any) -> bool:
    """Return whether a value is a message that a model may read, with any content."""
    return isinstance(value, Mapping) and value.get("role") in ROLES and "content" in value


@final
class Session:
    """An environment, or none for an empty name, and its tools, for one episode after another.

    `tools` are functions that the model may call, `calls` is the format of calls in texts.
    """

    def __init__(self, name: str, tools: Sequence[str], calls: str) -> None:
        """Load the environment. Raises ConfigError for what cannot be loaded."""
        self._calls, self._environment = calls, _load(name)
        functions = [named_callable(tool, "environment.tools") for tool in tools]
        own = self._environment
        self._is_stepped = hasattr(own, "step") and not hasattr(own, "get_reward")
        if own is not None and not self._is_stepped:
            members = inspect.getmembers(type(own), inspect.isfunction)
            public = [each for each, _ in members if each not in _NO_TOOLS and each[0] != "_"]
            functions += [getattr(own, each) for each in public]
        lacks = "" if self._is_stepped or functions else "step, and no public method that is a tool"
        lacks = lacks if own is None or hasattr(own, "reset") else "reset"
        if lacks:
            raise ConfigError(
                f"environment.name = {name!r}: it has no {lacks}; expected reset and step, or "
                "reset, get_reward and tools as public methods"
            )
        self._functions = {function.__name__: function for function in functions}
        self._runner = asyncio.Runner()  # one loop for all calls: clients are bound to theirs

    def tools(self) -> list[dict[str, Any]]:
        """Return JSON schemas of the tools; ConfigError for one without types or docstring."""
        try:
            return [tool_schema(function) for function in self._functions.values()]
        except Exception as error:
            raise ConfigError(
                f"environment: a tool has no schema ({error}); give each of its arguments a type "
                "and, under Args: in its docstring, a line"
            ) from error

    def reset(self, row: Mapping[str, Any], seed: int) -> Reply:
        """Begin an episode; `reset` takes those columns of the row that its signature names.

        The seed is one of them, unless the row has its own, and seeds global random numbers.
        """
        random.seed(seed)  # noqa: TID251 - games draw from it
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        if self._environment is None:
            return Reply()
        given, reset = {"seed": seed, **row}, self._environment.reset
        parameters = inspect.signature(reset).parameters.values()
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            given = {each.name: given[each.name] for each in parameters if each.name in given}
        observation = self._awaited(reset(**given))
        if isinstance(observation, tuple) and len(observation) == 2:
            observation = observation[0]  # gymnasium's, with info
        return Reply(messages=_messages(observation, "reset"))

    def step(self, text: str) -> Reply:
        """Answer a text: by the results of its calls, by the environment, or by the end."""
        if calls := parse(text, self._calls) if self._functions else []:
            results, errors = zip(*map(self._result, calls), strict=True)
            return Reply(messages=results, calls=len(calls), bad_calls=sum(errors))
        if not self._is_stepped:
            return self.finish()
        found = self._awaited(self._environment.step(text))
        if isinstance(found, tuple) and len(found) == 5:
            found = (*found[:2], found[2] or found[3])
        if not isinstance(found, tuple) or len(found) != 3:
            raise GradingError(f"step returned {found!r:.80}, not (observation, reward, done)")
        observation, reward, done = found
        messages = _messages(observation, "step")
        if not messages and not done:
            raise GradingError("step returned no observation, and the episode goes on")
        reward = checked_number(reward, source="step")
        return Reply(messages=messages, reward=reward, done=bool(done))

    def finish(self) -> Reply:
        """Return the reward of an episode that ends here, beyond those of its turns."""
        reward = 0.0
        if hasattr(self._environment, "get_reward"):
            reward = self._awaited(self._environment.get_reward())
        return Reply(reward=checked_number(reward, source="get_reward"), done=True)

    def close(self) -> None:
        """Close the environment, if it has `close`."""
        if hasattr(self._environment, "close"):
            self._awaited(self._environment.close())
        self._runner.close()

    def _awaited(self, value: Any) -> Any:
        return awaited(self._runner, value)

    def _result(self, call: Call) -> tuple[dict[str, str], bool]:
        """Return the message with the result of a call, and whether it is an error, as in TRL."""
        result, error = None, call.error
        try:
            if not error and call.name not in self._functions:
                error = f"Tool {call.name} not found."
            elif not error:
                function = self._functions[call.name]
                arguments = _typed(function, call.arguments) if call.is_text else call.arguments
                result = self._awaited(function(**arguments))
        except Exception as raised:  # noqa: BLE001 - the model reads it
            error = str(raised) or type(raised).__name__
        if error:
            result = {"error": error}
        is_parts = isinstance(result, list) and result and isinstance(result[0], Mapping)
        content = _text(result, call.name) if is_parts else _text(str(result), call.name)
        return {"role": "tool", "name": call.name, "content": content}, bool(error)


def _load(name: str) -> Any:
    """Return an environment, or None for an empty name."""
    scheme, _, rest = name.partition(":")
    adapter, package = ADAPTERS.get(scheme, (None, ""))
    try:
        if adapter is not None:
            return adapter(rest)
        return named_callable(name, "environment.name")() if name else None
    except LongtailError:
        raise
    except BaseException as error:
        remedy = f"; pip install {package}" if isinstance(error, ImportError) and adapter else ""
        raise ConfigError(f"environment.name = {name!r}: {describe(error)}{remedy}") from error


def _typed(function: Callable[..., Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments that were written without types: JSON, unless the function takes text."""
    hints, found = typing.get_type_hints(function), dict[str, Any](texts)
    for name, text in texts.items():
        hint = hints.get(name, str)
        if hint is not str and str not in typing.get_args(hint):
            with suppress(JsonError):
                found[name] = parse_json(text)
    return found


def _messages(observation: Any, source: str) -> tuple[dict[str, str], ...]:
    """Return the messages of an observation; GradingError if it has none."""
    if observation is None:
        return ()
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    for message in observation if isinstance(observation, list) else [None]:
        if not is_message(message):
            raise GradingError(
                f"{source} returned {observation!r:.80}, not a text, None or messages with a "
                f"content and one of the roles {', '.join(ROLES)}"
            )
    return tuple(
        {"role": each["role"], "content": _text(each["content"], source)} for each in observation
    )


def _text(content: Any, source: str) -> str:
    """Return text that tokenizers take, without halves of surrogate pairs."""
    text = join_parts(content) if isinstance(content, list) else content
    if not isinstance(text, str):
        raise GradingError(f"{source} returned {content!r:.80}: models here read text, no images")
    return text[:_MAX_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
