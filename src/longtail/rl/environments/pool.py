"""Environments of running episodes, each in a process of its own.

    begin(key, "reset", row, seed) --> answers(): (key, Reply) --> ask(key, "step", text) --> ...

An answer may be a sentence instead: why the episode has no reward.
"""

from typing import Annotated, Any

from pydantic import AfterValidator

from longtail.config.rewards import EnvironmentSection
from longtail.rl.environments.session import Reply, is_message
from longtail.rl.grading.answers import checked_number
from longtail.rl.processes.pool import ProcessPool
from longtail.rl.processes.process import Program


def _checked(reply: Reply) -> Reply:
    """Return a reply; an error for one that no session makes: the environment forged it."""
    checked_number(reply.reward, source="it")
    are_counts = 0 <= reply.bad_calls <= reply.calls < 2**31
    if not are_counts or not all(is_message(each) for each in reply.messages):
        raise ValueError("its messages or its numbers of calls are forged")
    return reply


_REPLY = Annotated[Reply, AfterValidator(_checked)]
_KINDS = {"tools": list[dict[str, Any]], "reset": _REPLY, "step": _REPLY, "finish": _REPLY}


def open_environments(own: EnvironmentSection, calls: str, *, most: int) -> ProcessPool:
    """Return environments for at most `most` episodes at a time, which answer as a `Session` does.

    `calls` is the format of calls in texts. The time of the model does not count.
    """
    program = Program(
        field=f"environment.name = {own.name!r}",
        make="longtail.rl.environments.session:Session",
        arguments=(own.name or "", own.tools, calls),
        is_confined=True,
        network=own.network,
    )
    return ProcessPool(
        program, _KINDS, most=most, call_s=own.timeout_s, total_s=own.episode_timeout_s
    )
