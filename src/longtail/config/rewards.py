"""Configuration of rewards and environments."""

from typing import Literal

from longtail.config.sections import Count, Name, Processes, Seconds, Section

ENVIRONMENT = "environment"
"""Reward that an environment gives."""


class RewardSection(Section):
    """Grading of completions."""

    name: Name = "last_number"
    """`exact`, `last_number` (the completion's last number equals the answer), `math_verify`,
    `reasoning_gym`, `environment` (the sum of its rewards), or `module:function` as in TRL. Unset,
    problems of reasoning-gym have `reasoning_gym`, and episodes `environment`."""
    per: Literal["completion", "group"] = "completion"
    """Completions in one call of `module:function`: one, so that a failure excludes no other; or
    the whole group of a prompt, to compare them."""
    timeout_s: Seconds = 10.0
    """Most seconds per call; a slower grader is killed, and its rollouts excluded."""
    workers: Processes = 1
    """Number of grader processes: as many as memory has room for, and at most 32 per core."""


class EnvironmentSection(Section):
    """Environment of episodes: it answers the model's turns."""

    name: Name | None = None
    """`module:Class` (with `reset` and `step`, or with `reset`, tools and `get_reward` as in TRL),
    `textarena:ID`, `gem:ID` or `skyrl:ID`; unset, completions have one turn."""
    tools: tuple[Name, ...] = ()
    """Functions, `module:function`, that the model may call; their docstrings describe them."""
    max_turns: Count = 8
    """Most turns of an episode; `rollout.max_tokens` bounds the tokens that it writes."""
    max_observed: Count = 1024
    """Most tokens of an episode's observations; a longer one ends the episode. The environment's
    first messages and descriptions of tools share this room of the engine's length."""
    timeout_s: Seconds = 30.0
    """Most seconds of an answer; a slower environment is killed, and the episode excluded."""
    episode_timeout_s: Seconds = 600.0
    """Most seconds of an episode's answers."""
    network: bool = False
    """Whether environments and tools reach the network."""

    @property
    def is_on(self) -> bool:
        """Whether completions are episodes."""
        return self.name is not None or bool(self.tools)
