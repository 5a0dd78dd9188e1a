"""Episodes: completions of several turns, between which an environment answers.

    request --begin--> environment --prompt--> turn --step--> environment --observation--> turn ...
                                                                  `--done--> Completion

A generator around another one, which writes each turn as a request of its own: its prompt is all
that the episode has so far, and its noise is that of the episode's key at these positions. So an
episode is a function of weights, row, sampling, key and environment, as a completion is (law 1).
While an environment answers, the episode has no row of a step; its KV waits for the next turn.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar, final

from torch import Tensor

from longtail.config.rewards import EnvironmentSection
from longtail.engine.text import Decode
from longtail.errors import DataError, RequestError
from longtail.generator import Emitted, Failed, Generator, StepReport, Verified
from longtail.model.hf.turns import Turns
from longtail.rl.environments.session import Reply
from longtail.rl.processes.pool import ProcessPool
from longtail.types import Completion, Episode, FinishReason, Request

Part = TypeVar("Part", Emitted, Failed, Verified)

_WAIT_S = 0.05
"""Most seconds of a step in which only environments work."""
_SEEDS = 1 << 31
"""Number of seeds: what random number generators take."""


@dataclass(slots=True, kw_only=True)
class RunningEpisode:
    """An episode in progress."""

    request: Request
    prompt: tuple[int, ...] = ()
    prompt_text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Finished turns and observations."""
    logprobs: list[float] = field(default_factory=list)
    observed: list[tuple[int, int]] = field(default_factory=list)
    messages: list[Mapping[str, str]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    num_turns: int = 0
    last_turn: int = 0
    """Place of the newest turn in `tokens`."""
    last: Completion | None = None
    """The newest turn."""
    num_calls: int = 0
    num_bad_calls: int = 0
    asked: float = 0.0
    """Time of the newest question to the environment."""
    waited_s: float = 0.0
    is_closing: bool = False
    """Whether it is cut, and the environment was asked for its reward."""

    @property
    def turn_id(self) -> str:
        """Id of the request of the present turn."""
        return f"{self.request.request_id}/{self.num_turns}"

    @property
    def num_observed(self) -> int:
        """Number of tokens of all observations."""
        return sum(end - begin for begin, end in self.observed)

    def left(self, max_len: int, num_observed: int = 0) -> int:
        """Return the most tokens that can still be written, after `num_observed` others."""
        generated = len(self.tokens) - self.num_observed
        room = max_len - len(self.prompt) - len(self.tokens) - num_observed
        return min(self.request.sampling.max_tokens - generated, room)

    def completion(
        self, decode: Decode, policy_version: int, reason: FinishReason, problem: str
    ) -> Completion:
        """Return all turns."""
        tokens = tuple(self.tokens)
        if self.last is not None and tokens[self.last_turn :] == self.last.tokens:
            text = decode(tokens[: self.last_turn]) + self.last.text
        else:
            text = decode(tokens)
        return Completion(
            request_id=self.request.request_id,
            tokens=tokens,
            logprobs=tuple(self.logprobs),
            text=text,
            finish_reason=reason,
            policy_version=policy_version,
            episode=Episode(
                prompt_tokens=self.prompt or self.request.prompt_tokens,
                prompt=self.prompt_text,
                observed=tuple(self.observed),
                messages=tuple(self.messages),
                rewards=tuple(self.rewards),
                num_calls=self.num_calls,
                num_bad_calls=self.num_bad_calls,
                waited_s=self.waited_s,
                problem=problem,
            ),
        )


@final
class EpisodeGenerator(Generator):
    """Generates episodes on a generator of turns; requests have a row."""

    def __init__(
        self,
        inner: Generator,
        environments: ProcessPool,
        turns: Turns,
        decode: Decode,
        own: EnvironmentSection,
        *,
        max_len: int,
    ) -> None:
        """`max_len`: most tokens of everything that an episode has."""
        self.inner = inner
        self._environments, self._turns, self._decode = environments, turns, decode
        self._own, self._max_len = own, max_len
        self._waiting = deque[str]()
        """Episodes without an environment."""
        self._running: dict[str, RunningEpisode] = {}
        """All unfinished episodes."""
        self._finished: list[Completion] = []

    # ---- as any generator

    @property
    def policy_version(self) -> int:
        """Version of the present weights."""
        return self.inner.policy_version

    def check(self, request: Request) -> None:
        """Raise RequestError if this generator can never serve the request; thread-safe."""
        self.inner.check(request)

    def submit(self, request: Request) -> None:
        """Queue an episode."""
        self.check(request)
        name = request.request_id
        if name in self._running:
            raise RequestError(f"request {name!r} is already in progress")
        self._running[name] = RunningEpisode(request=request)
        self._waiting.append(name)

    def abort(self, request_id: str) -> None:
        """Remove an unfinished episode."""
        if request_id not in self._running:
            raise RequestError(f"request {request_id!r} is not in progress")
        episode = self._running[request_id]
        if self.inner.is_unfinished(episode.turn_id):
            self.inner.abort(episode.turn_id)
        self._end(episode)

    def step(self) -> StepReport:
        """Take the answers of environments, and advance the turns that are being written."""
        started = time.perf_counter()
        while self._waiting and self._environments.num_free:
            episode = self._running[name := self._waiting.popleft()]
            request, episode.asked = episode.request, time.perf_counter()
            seed = request.noise_key % _SEEDS
            self._environments.begin(name, "reset", dict(request.row or {}), seed)
        wait_s = 0.0 if self.inner.num_unfinished else _WAIT_S
        for name, answer in self._environments.answers(wait_s):
            self._on_answer(self._running[name], answer)
        report = self.inner.step() if self.inner.num_unfinished else _nothing(started)
        for turn in report.finished:
            self._on_turn(self._running[_episode_of(turn.request_id)], turn)
        verified = [self._verified(each) for each in report.verified]
        for each in report.failed:
            self._end(self._running[_episode_of(each.request_id)])
        finished, self._finished = self._finished, []
        return replace(
            report,
            finished=tuple(finished),
            failed=tuple(_named(each) for each in report.failed),
            emitted=tuple(_named(each) for each in report.emitted),
            verified=tuple(verified),
        )

    def unfinished(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Return (id, tokens so far, prompt length) of each unfinished episode; thread-safe."""
        turns = {name: tokens for name, tokens, _ in self.inner.unfinished()}
        found = []
        for name, episode in list(self._running.items()):
            prompt = episode.prompt or episode.request.prompt_tokens
            tokens = turns.get(episode.turn_id, (*prompt, *episode.tokens))
            found.append((name, tokens, len(prompt)))
        return found

    def load_policy(self, version: int, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Take all weights of a policy; no episode may be in progress."""
        if self._running:
            raise RequestError(f"{len(self._running)} episodes are unfinished; abort them first")
        self.inner.load_policy(version, parameters)

    def load_drafter(self, tensors: Mapping[str, Tensor]) -> None:
        """Draft with other weights from the next step on."""
        self.inner.load_drafter(tensors)

    def save_drafter(self, path: Path) -> None:
        """Write the drafter that it learns by itself; nothing if there is none."""
        self.inner.save_drafter(path)

    def sleep(self) -> None:
        """Free memory while idle."""
        self.inner.sleep()

    def close(self) -> None:
        """End all environments."""
        self._environments.close()
        self.inner.close()

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished episodes."""
        return len(self._running)

    def is_unfinished(self, request_id: str) -> bool:
        """Return whether the episode waits or runs."""
        return request_id in self._running

    def _verified(self, found: Verified) -> Verified:
        """Return a verified draft by its turn, and its place in the episode."""
        episode = self._running[_episode_of(found.request_id)]
        is_over = found.request_id != episode.turn_id
        begin = episode.last_turn if is_over else len(episode.tokens)
        turn = int(found.request_id.rpartition("/")[2])
        return replace(_named(found), position=begin + found.position, turn=turn)

    # ---- turns

    def _on_turn(self, episode: RunningEpisode, turn: Completion) -> None:
        """Give a finished turn to the environment."""
        episode.last, episode.last_turn = turn, len(episode.tokens)
        episode.tokens += turn.tokens
        episode.logprobs += turn.logprobs
        episode.messages.append({"role": "assistant", "content": turn.text})
        episode.num_turns += 1
        episode.asked = time.perf_counter()
        self._environments.ask(episode.request.request_id, "step", turn.text)

    def _on_answer(self, episode: RunningEpisode, answer: Reply | str) -> None:
        """Go on with an episode whose environment has answered."""
        episode.waited_s += time.perf_counter() - episode.asked
        if isinstance(answer, str):
            self._finish(episode, FinishReason.STOP, answer)
            return
        try:
            if not episode.num_turns:
                given = (episode.request.row or {}).get("prompt", "")
                episode.prompt_text, episode.prompt = self._turns.prompt(given, answer.messages)
                self._submit(episode)
            else:
                self._observe(episode, answer)
        except (DataError, RequestError) as error:
            self._finish(episode, FinishReason.STOP, str(error))

    def _observe(self, episode: RunningEpisode, answer: Reply) -> None:
        """Append an observation, and begin the next turn; or end the episode."""
        turn, own = episode.last, self._own
        assert turn is not None, "an observation follows a turn"
        if episode.is_closing:
            episode.rewards[-1] += answer.reward
            self._finish(episode, FinishReason.LENGTH)
            return
        episode.rewards.append(answer.reward)
        episode.num_calls += answer.calls
        episode.num_bad_calls += answer.bad_calls
        if answer.done:
            self._finish(episode, turn.finish_reason)
            return
        tokens = self._turns.observed(turn.tokens, answer.messages)
        if (
            turn.finish_reason is FinishReason.LENGTH
            or episode.num_turns == own.max_turns
            or episode.num_observed + len(tokens) > own.max_observed
            or episode.left(self._max_len, len(tokens)) < 1
        ):
            episode.is_closing, episode.asked = True, time.perf_counter()
            self._environments.ask(episode.request.request_id, "finish")
            return
        begin = len(episode.tokens)
        episode.tokens += tokens
        episode.logprobs += [0.0] * len(tokens)
        episode.observed.append((begin, len(episode.tokens)))
        episode.messages += answer.messages
        self._submit(episode)

    def _submit(self, episode: RunningEpisode) -> None:
        """Begin the next turn."""
        request, number = episode.request, episode.num_turns
        left = max(episode.left(self._max_len), 1)
        turn = replace(
            request,
            request_id=episode.turn_id,
            prompt_tokens=(*episode.prompt, *episode.tokens),
            sampling=replace(request.sampling, max_tokens=left),
            group_id="" if number else request.group_id,
            row=None,
            may_go_on=number + 1 < self._own.max_turns,
            continues=f"{request.request_id}/{number - 1}" if number else "",
        )
        self.inner.submit(turn)

    # ---- ends

    def _finish(self, episode: RunningEpisode, reason: FinishReason, problem: str = "") -> None:
        done = episode.completion(self._decode, self.policy_version, reason, problem)
        self._finished.append(done)
        self._end(episode)

    def _end(self, episode: RunningEpisode) -> None:
        name = episode.request.request_id
        del self._running[name]
        if name in self._waiting:
            self._waiting.remove(name)
        else:
            self._environments.end(name)


def _episode_of(turn_id: str) -> str:
    return turn_id.rpartition("/")[0]


def _named(part: Part) -> Part:
    """Return a part of a report with the episode's id."""
    return replace(part, request_id=_episode_of(part.request_id))


def _nothing(started: float) -> StepReport:
    """Return the report of a step in which environments worked alone."""
    return StepReport(
        num_tokens=0,
        num_running=0,
        step_s=time.perf_counter() - started,
        forward_s=0.0,
        sample_s=0.0,
        emitted=(),
        finished=(),
    )
