"""Graded completions, graders of them, and steps of a rollout."""

from collections.abc import Callable, Sequence
from typing import Any

from longtail.generator import StepReport
from longtail.rl.grading.pool import Graded, GraderPool
from longtail.types import Completion, FinishReason, GradingFailure, Prompt, Rollout


def completion(request_id: str, tokens: Sequence[int], **fields: object) -> Completion:
    """Return a completion that stopped by itself; its logprobs are -0.5 unless given."""
    usual = {"logprobs": (-0.5,) * len(tokens), "text": "", "policy_version": 0}
    usual["finish_reason"] = FinishReason.STOP
    return Completion(request_id=request_id, tokens=tuple(tokens), **{**usual, **fields})  # type: ignore[arg-type]


def rollout(
    tokens: Sequence[int],
    prompt_len: int,
    *,
    number: int = 0,
    reward: float = 0.0,
    **fields: object,
) -> Rollout:
    """Return a rollout of tokens that begin with the prompt; `fields` are the completion's."""
    prompt = Prompt(prompt_id=f"p{number}", tokens=tuple(tokens[:prompt_len]), text="")
    request_id = str(fields.pop("request_id", f"r{number}"))
    made = completion(request_id, tokens[prompt_len:], **fields)
    return Rollout(prompt=prompt, completion=made, reward=reward)


def graders(reward: Callable[[str], float | None]) -> GraderPool:
    """Return a pool without processes; a reward is that of a request's id, None a failure."""

    def grade(pairs: Any) -> Graded:
        rollouts, failures = list[Rollout](), list[GradingFailure]()
        for prompt, made in pairs:
            if (found := reward(made.request_id)) is None:
                failures.append(GradingFailure(prompt=prompt, completion=made, error="no"))
            else:
                rollouts.append(Rollout(prompt=prompt, completion=made, reward=found))
        return Graded(rollouts=tuple(rollouts), failures=tuple(failures))

    pool: Any = object.__new__(GraderPool)
    pool.grade = grade
    return pool


def step_report(num_running: int, *, step_s: float = 0.25, **fields: Any) -> StepReport:
    """Return the report of a step of 10 tokens; the pass takes half of it, drawing a quarter."""
    usual = {"num_tokens": 10, "forward_s": step_s / 2, "sample_s": step_s / 4}
    usual |= {"emitted": (), "finished": ()}
    return StepReport(num_running=num_running, step_s=step_s, **{**usual, **fields})
