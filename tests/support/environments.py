"""Environments in this process, whose answers come late and in another order."""

import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from longtail.cluster.workers.episodes import EpisodeGenerator
from longtail.config.rewards import EnvironmentSection
from longtail.generator import Generator
from longtail.model.hf.turns import Turns
from longtail.rl.environments.session import Reply
from longtail.types import Request, SamplingParams

LIMITS = EnvironmentSection(max_turns=4, max_observed=40)
MAX_LEN = 120


class Counting:
    """Says how many letters it has read, with its seed; it ends on the third turn."""

    def __init__(self, row: Mapping[str, Any], seed: int) -> None:
        self._seed, self._read, self._turns = seed % 10, len(row["prompt"]), 0

    def reset(self) -> Reply:
        return Reply(messages=({"role": "user", "content": f"?{self._seed}"},))

    def step(self, text: str) -> Reply:
        self._read += sum(map(ord, text))
        self._turns += 1
        said = {"role": "user", "content": f"[{self._read % 97}]"}
        return Reply(messages=(said,), reward=len(text) / 8, done=self._turns == 3)


class InProcess:
    """The interface of `rl.processes.pool.ProcessPool`."""

    def __init__(self, make: Callable[..., Any] = Counting, most: int = 3, seed: int = 0) -> None:
        self._make, self._most, self._random = make, most, random.Random(seed)
        self._running: dict[str, Any] = {}
        self._answers: list[tuple[str, Reply | str]] = []

    @property
    def num_free(self) -> int:
        return self._most - len(self._running)

    def begin(self, key: str, method: str, row: Mapping[str, Any], seed: int) -> None:
        assert self.num_free, "see num_free"
        self._running[key] = self._make(row, seed)
        self._answers.append((key, self._running[key].reset()))

    def ask(self, key: str, method: str, *text: str) -> None:
        finished = Reply(reward=100.0, done=True)
        self._answers.append((key, self._running[key].step(*text) if text else finished))

    def end(self, key: str) -> None:
        del self._running[key]
        self._answers = [each for each in self._answers if each[0] != key]

    def answers(self, timeout_s: float) -> list[tuple[str, Reply | str]]:
        self._random.shuffle(self._answers)
        count = len(self._answers) if timeout_s else self._random.randrange(2)
        found, self._answers = self._answers[:count], self._answers[count:]
        return found


def turns() -> Turns:
    """Observations as plain text, a token for each character."""
    encode = lambda text, **_: tuple(ord(c) % 128 for c in text)  # noqa: E731
    tokenizer: Any = SimpleNamespace(encode=encode, eos_ids=())
    return Turns(tokenizer, None)


def in_episodes(inner: Generator, max_len: int = MAX_LEN, **environments: Any) -> EpisodeGenerator:
    decode = lambda tokens: "".join(map(chr, tokens))  # noqa: E731
    pool: Any = InProcess(**environments)
    return EpisodeGenerator(inner, pool, turns(), decode, LIMITS, max_len=max_len)


def requests_of(count: int, sampling: SamplingParams, **more: Any) -> list[Request]:
    """Requests in groups of two."""
    return [
        Request(
            request_id=f"{index // 2}#{index % 2}",
            prompt_tokens=(1,),
            noise_key=7 * index + 1,
            sampling=sampling,
            group_id=str(index // 2),
            row={"prompt": "ab" * (1 + index // 2), **more},
        )
        for index in range(count)
    ]
