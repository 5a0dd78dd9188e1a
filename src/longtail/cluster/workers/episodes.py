"""Episodes: completions of several turns, between which an environment answers.

    request --begin--> environment --prompt--> turn --step--> environment --observation--> turn ...
                                                                  `--done--> Completion

A generator around another one, which writes each turn as a request of its own: its prompt is all
that the episode has so far, and its noise is that of the episode's key at these positions. So an
episode is a function of weights, row, sampling, key and environment, as a text is (law 1). While an
environment answers, the episode has no row of a step; its KV waits for the next turn.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, final

from torch import Tensor

from longtail.cluster.workers.running_episode import EpisodeLimits, RunningEpisode
from longtail.engine.text import Decode
from longtail.errors import DataError, RequestError
from longtail.generator import Emitted, Failed, Generator, StepReport, Verified
from longtail.model.hf.turns import Turns
from longtail.rl.environments.pool import Environments
from longtail.rl.environments.records import Reply
from longtail.types import Completion, Episode, FinishReason, Request

Part = TypeVar("Part", Emitted, Failed, Verified)

_WAIT_S = 0.05
"""Most seconds of a step in which only environments work."""
_SEEDS = 1 << 31
"""Number of seeds: what random number generators take."""


@final
class EpisodeGenerator(Generator):
    """Writes episodes on a generator of texts; requests have a row."""

    def __init__(
        self,
        inner: Generator,
        environments: Environments,
        turns: Turns,
        decode: Decode,
        limits: EpisodeLimits,
    ) -> None:
        self.inner = inner
        self._environments, self._turns, self._decode = environments, turns, decode
        self._limits = limits
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

    def submit(self, request: Request, begun: Completion | None = None) -> None:
        """Queue an episode, or continue one that another generator had begun.

        Then a new environment gets the same turns, and must answer as the first did.
        """
        self.check(request)
        name = request.request_id
        if name in self._running:
            raise RequestError(f"request {name!r} is already in progress")
        self._running[name] = RunningEpisode(
            request=request, begun=begun if begun is not None and begun.tokens else None
        )
        self._waiting.append(name)

    def abort(self, request_id: str) -> Completion:
        """Remove an unfinished episode and return what is written of it."""
        if request_id not in self._running:
            raise RequestError(f"request {request_id!r} is not in progress")
        episode = self._running[request_id]
        turn = None
        if self.inner.is_unfinished(episode.turn_id):
            turn = self.inner.abort(episode.turn_id)
        self._end(episode)
        if episode.begun is not None:  # the environment is not where it was
            return episode.begun
        if episode.is_closing:  # its last turn is counted again
            episode.rewards.pop()
        return self._completion(episode, FinishReason.ABORT, turn)

    def step(self) -> StepReport:
        """Take the answers of environments, and advance the turns that are being written."""
        started = time.perf_counter()
        while self._waiting and self._environments.num_free:
            episode = self._running[self._waiting.popleft()]
            request, episode.asked = episode.request, time.perf_counter()
            seed = request.noise_key % _SEEDS
            self._environments.begin(request.request_id, request.row or {}, seed)
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
        self._step(episode, turn.text)

    def _step(self, episode: RunningEpisode, text: str) -> None:
        episode.asked = time.perf_counter()
        self._environments.step(episode.request.request_id, text)

    def _on_answer(self, episode: RunningEpisode, answer: Reply | str) -> None:
        """Go on with an episode whose environment has answered."""
        episode.waited_s += time.perf_counter() - episode.asked
        if isinstance(answer, str):
            self._finish(episode, FinishReason.STOP, answer)
            return
        try:
            if episode.begun is not None:
                self._repeat(episode, episode.begun, answer)
            elif not episode.num_turns:
                self._open(episode, answer)
                self._submit(episode)
            else:
                self._observe(episode, answer)
        except (DataError, RequestError) as error:
            self._finish(episode, FinishReason.STOP, str(error))

    def _open(self, episode: RunningEpisode, answer: Reply) -> None:
        given = (episode.request.row or {}).get("prompt", "")
        episode.prompt_text, episode.prompt = self._turns.prompt(given, answer.messages)

    def _observe(self, episode: RunningEpisode, answer: Reply) -> None:
        """Append an observation, and begin the next turn; or end the episode."""
        turn, limits = episode.last, self._limits
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
            or episode.num_turns == limits.max_turns
            or episode.num_observed + len(tokens) > limits.max_observed
            or episode.left(limits.max_len, len(tokens)) < 1
        ):
            episode.is_closing, episode.asked = True, time.perf_counter()
            self._environments.finish(episode.request.request_id)
            return
        begin = len(episode.tokens)
        episode.tokens += tokens
        episode.logprobs += [0.0] * len(tokens)
        episode.observed.append((begin, len(episode.tokens)))
        episode.messages += answer.messages
        self._submit(episode)

    def _submit(self, episode: RunningEpisode, begun: Completion | None = None) -> None:
        """Begin the next turn."""
        request, number = episode.request, episode.num_turns
        left = max(episode.left(self._limits.max_len), 1)
        turn = replace(
            request,
            request_id=episode.turn_id,
            prompt_tokens=(*episode.prompt, *episode.tokens),
            sampling=replace(request.sampling, max_tokens=left),
            group_id="" if number else request.group_id,
            row=None,
            may_go_on=number + 1 < self._limits.max_turns,
            continues=f"{request.request_id}/{number - 1}" if number else "",
        )
        self.inner.submit(turn, begun)

    # ---- episodes that move

    def _repeat(self, episode: RunningEpisode, begun: Completion, answer: Reply) -> None:
        """Bring an environment to where it was when another generator gave the episode up."""
        recorded, done = begun.episode, len(episode.rewards)
        assert recorded is not None, "episodes are given up as such"
        turns = _turns(recorded.messages)
        if not episode.prompt:
            self._open(episode, answer)
            is_equal = episode.prompt == recorded.prompt_tokens
        else:
            given = list(answer.messages), answer.reward
            is_equal = given == (turns[done][1:], recorded.rewards[done])
            episode.rewards.append(answer.reward)
        done = len(episode.rewards)
        if not is_equal:
            self._finish(episode, FinishReason.STOP, "the environment is not repeatable")
        elif done < len(recorded.rewards):
            self._step(episode, turns[done][0]["content"])
        else:
            self._resume(episode, begun, recorded)

    def _resume(self, episode: RunningEpisode, begun: Completion, recorded: Episode) -> None:
        """Go on with the turn that another generator had begun, or finished."""
        place = recorded.observed[-1][1] if recorded.observed else 0
        episode.tokens, episode.logprobs = list(begun.tokens[:place]), list(begun.logprobs[:place])
        episode.observed, episode.num_turns = list(recorded.observed), len(recorded.rewards)
        episode.messages = [each for turn in _turns(recorded.messages) for each in turn]
        episode.num_calls, episode.num_bad_calls = recorded.num_calls, recorded.num_bad_calls
        episode.begun = None
        turn = replace(
            begun,
            request_id=episode.turn_id,
            tokens=begun.tokens[place:],
            logprobs=begun.logprobs[place:],
            episode=None,
        )
        if episode.messages[-1:] and episode.messages[-1]["role"] == "assistant":
            text = episode.messages.pop()["content"]
            is_cut = len(turn.tokens) == episode.left(self._limits.max_len)
            reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
            self._on_turn(episode, replace(turn, text=text, finish_reason=reason))
        else:
            self._submit(episode, turn if turn.tokens else None)

    # ---- ends

    def _finish(self, episode: RunningEpisode, reason: FinishReason, problem: str = "") -> None:
        self._finished.append(self._completion(episode, reason, problem=problem))
        self._end(episode)

    def _completion(
        self,
        episode: RunningEpisode,
        reason: FinishReason,
        turn: Completion | None = None,
        problem: str = "",
    ) -> Completion:
        return episode.completion(self._decode, self.policy_version, reason, turn, problem)

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


def _turns(messages: Sequence[Mapping[str, str]]) -> list[list[Mapping[str, str]]]:
    """Return each turn's message, with the observation behind it."""
    found: list[list[Mapping[str, str]]] = []
    for each in messages:
        if each["role"] == "assistant":
            found.append([])
        found[-1].append(each)
    return found


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
