"""Environments of other packages as text environments: `textarena:ID`, `gem:ID`, `skyrl:ID`.

`gem:rg:NAME` is a task of reasoning-gym; `gem:ID+python` gives any of them GEM's Python tool.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, final


@final
class TextArena:
    """A game of TextArena for one player; an observation is what is new to that player."""

    def __init__(self, name: str) -> None:
        self._package = import_module("textarena")
        self._environment = self._package.make(name)

    def reset(self, seed: int) -> str:
        """Begin a game."""
        self._environment.reset(num_players=1, seed=seed)
        return self._news()

    def step(self, text: str) -> tuple[str, float, bool]:
        """Make a move; the reward comes with the last one."""
        done, _ = self._environment.step(text)
        rewards = self._environment.close()[0] if done else None
        return self._news(), (rewards or {}).get(0, 0.0), done

    def _news(self) -> str:
        # The wrappers of a game repeat what was read in earlier turns, and the player's own texts
        game = self._environment
        while isinstance(game, self._package.Wrapper):
            game = game.env
        own = self._package.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in game.get_observation()[1] if kind != own)


def _gem(name: str) -> Any:
    """Return an environment of GEM, which has gymnasium's methods."""
    environment = import_module("gem").make(name.removesuffix("+python"))
    if name.endswith("+python"):
        tool = import_module("gem.tools.python_code_tool").PythonCodeTool()
        wrapper = import_module("gem.tools.tool_env_wrapper").ToolEnvWrapper
        environment = wrapper(environment, tools=[tool])
    return environment


@final
class SkyRL:
    """An environment of SkyRL-gym, made anew for each row, whose columns are its extras."""

    def __init__(self, name: str) -> None:
        self._package, self._name = import_module("skyrl_gym"), name
        self._environment: Any = None
        self._package.spec(name)  # raises for a name that is not registered

    def reset(self, prompt: Any = (), **row: Any) -> Any:
        """Make an environment; return the messages that it adds to the prompt."""
        self.close()
        self._environment = self._package.make(self._name, extras=row)
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        messages, _ = self._environment.init(prompt)
        return messages[len(prompt) :]

    def step(self, text: str) -> tuple[Any, float, bool]:
        """Answer a text."""
        output = self._environment.step(text)
        return output["observations"], output["reward"], output["done"]

    def close(self) -> None:
        """Close the environment of the last row."""
        if self._environment is not None:
            self._environment.close()


ADAPTERS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "textarena": (TextArena, "textarena"),
    "gem": (_gem, "gem-llm"),
    "skyrl": (SkyRL, "skyrl-gym"),
}
"""By the first part of `environment.name`: what makes one from the rest, and what to install."""
