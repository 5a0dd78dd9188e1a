"""Graded completions, made of tokens whose first part is the prompt, and graders of them."""

from collections.abc import Callable, Sequence
from typing import Any

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
    """Return a rollout; `fields` are those of the completion."""
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
