"""Laws 1, 3 and 5 for episodes: with any drafts, in any order of answers."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.generator import Verified
from longtail.model.hf.weights import hf_rows
from longtail.rl.logprobs import score
from longtail.rl.packing import pack_group
from longtail.speculation.strategy import Strategy
from longtail.types import Completion, FinishReason, Prompt, Request, Rollout, SamplingParams
from support.drafters import ScriptedDrafter, ragged
from support.environments import MAX_LEN, Counting, InProcess, in_episodes, requests_of, turns
from support.tiny_models import tiny_model

MODEL = tiny_model("qwen3", dtype=torch.float64, head_dim=16)
SAMPLING = SamplingParams(max_tokens=30, stop_token_ids=tuple(range(0, 128, 9)))
REQUESTS = requests_of(10, SAMPLING)


def engine(**limits: Any) -> RolloutEngine:
    roomy = {"max_running": 4, "max_step_tokens": 24, "max_len": MAX_LEN}
    return RolloutEngine(
        MODEL, lambda tokens: "".join(map(chr, tokens)), EngineLimits(**roomy | limits)
    )


def by_definition(request: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens and rewards, each turn computed from the first token on in an engine of its own."""
    environment, form = Counting(request.row or {}, request.noise_key), turns()
    _, prompt = form.prompt((request.row or {})["prompt"], environment.reset().messages)
    tokens, rewards, left = (), list[float](), SAMPLING.max_tokens
    while True:
        sampling = replace(SAMPLING, max_tokens=min(left, MAX_LEN - len(prompt + tokens)))
        asked = replace(request, prompt_tokens=prompt + tokens, sampling=sampling)
        (turn,) = engine().generate([asked])
        tokens, left = tokens + turn.tokens, left - len(turn.tokens)
        answer = environment.step(turn.text)
        rewards.append(answer.reward)
        observed = form.observed(turn.tokens, answer.messages)
        if answer.done or turn.finish_reason is FinishReason.LENGTH:
            return tokens, (*rewards[:-1], rewards[-1] + 100.0 * (not answer.done))
        tokens += observed


@pytest.fixture(scope="module")
def plain() -> list[Completion]:
    return in_episodes(engine()).generate(REQUESTS)


def bare(done: Completion) -> Completion:
    """An episode without its clock, and logprobs, which round otherwise in other batches."""
    assert done.episode is not None
    return replace(done, logprobs=(), episode=replace(done.episode, waited_s=0.0))


def test_episodes_are_what_turns_one_by_one_are(plain: list[Completion]) -> None:
    for request, done in zip(REQUESTS, plain, strict=True):
        assert done.episode is not None
        assert (done.tokens, done.episode.rewards) == by_definition(request)
    assert len({done.finish_reason for done in plain}) == 2
    assert max(len(done.episode.observed) for done in plain if done.episode) == 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drafted", [False, True])
def test_episodes_depend_on_no_draft_order_or_memory(
    plain: list[Completion], seed: int, drafted: bool
) -> None:
    inner = engine(max_running=2 + seed, max_step_tokens=9 + 7 * seed, kv_tokens=128 + 64 * seed)
    if drafted:
        texts = {
            f"{done.request_id}/{number}": (*done.episode.prompt_tokens, *done.tokens)
            for done in plain
            if done.episode
            for number in range(4)
        }
        inner.speculate(
            Speculation.fixed(ScriptedDrafter(texts, ragged(5)), Strategy(depth=3, size=5))
        )
    verified = list[Verified]()
    written = in_episodes(inner, most=6, seed=seed).generate(
        REQUESTS, lambda step: verified.extend(step.verified)
    )
    assert list(map(bare, written)) == list(map(bare, plain))
    observed = {done.request_id: done.episode.observed for done in plain if done.episode}
    for each in verified:
        assert each.turn == sum(end <= each.position for _, end in observed[each.request_id])
    assert {each.turn for each in verified} == ({0, 1, 2} if drafted else set())
    inner.load_policy(1, hf_rows(inner.model).items())
    assert inner.kv_usage().owned == 0  # KV of ended turns is not kept under other weights


def test_a_later_turn_computes_the_observation_and_no_text_before_it(
    plain: list[Completion],
) -> None:
    generator, computed = in_episodes(engine(max_running=1), most=1), list[int]()
    generator.generate(REQUESTS[:1], lambda step: computed.append(step.num_tokens))
    (done,) = plain[:1]
    assert done.episode is not None
    assert done.episode.observed
    assert sum(computed) < len(done.episode.prompt_tokens) + len(done.tokens) + 1


def test_an_episode_that_is_given_up_is_written_again(plain: list[Completion]) -> None:
    for steps in range(1, 40, 3):
        generator, done = in_episodes(engine(), seed=steps), list[Completion]()
        for each in REQUESTS[:4]:
            generator.submit(each)
        for _ in range(steps):
            done += generator.step().finished if generator.num_unfinished else ()
        left = [each for each in REQUESTS[:4] if generator.is_unfinished(each.request_id)]
        for each in left:
            generator.abort(each.request_id)
        done += generator.generate(left)
        found = sorted(map(bare, done), key=lambda each: each.request_id)
        assert found == list(map(bare, plain[:4]))


def test_logprobs_are_the_learners_and_observations_have_no_loss(plain: list[Completion]) -> None:
    for begin in range(0, len(plain), 2):
        pair = plain[begin : begin + 2]
        prompt = Prompt(prompt_id="p", tokens=(1,), text="")
        rollouts = [Rollout(prompt=prompt, completion=done, reward=0.0) for done in pair]
        for batch in pack_group(rollouts, [1.0, -1.0], budget=512):
            rows = batch.packed.loss_mask.nonzero()[:, 0]
            assert len(rows) == sum(done.num_generated for done in pair)
            with torch.no_grad():
                scores = score(MODEL, batch.packed, SAMPLING)
            torch.testing.assert_close(
                scores.logprobs, batch.rollout_logprobs[rows], rtol=0, atol=1e-12
            )
            outside = batch.packed.loss_mask == 0
            assert not batch.advantages[outside].any()
            assert not batch.rollout_logprobs[outside].any()


def test_an_environment_that_fails_is_named() -> None:
    class Failing(InProcess):
        def ask(self, key: str, method: str, *text: str) -> None:
            self._answers.append((key, "it exploded"))

    generator = in_episodes(engine())
    generator._environments = Failing()  # type: ignore[assignment]
    (done,) = generator.generate(REQUESTS[:1])
    assert done.episode is not None
    assert done.episode.problem == "it exploded"
