"""RUN/cost.json: the cost model after the newest training step."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longtail.errors import CheckpointError, ConfigError
from longtail.tuner.cost import CostModel, DraftCost
from longtail.tuner.records import Batch

FILE = "cost.json"
TOKENS = (1, 8, 32, 64, 128, 256)
"""Flat tokens of the steps in the table of step times."""
_PASSES = 4.0
"""Passes of the drafts in the text of draft times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Milliseconds of a step.

    Example: StepTime(tokens=8, plain_ms=2.1, verify_ms=2.2)
    """

    tokens: int
    plain_ms: float
    verify_ms: float
    """Milliseconds of a step that verifies drafts, without drafting."""


def save_costs(path: Path, costs: CostModel) -> None:
    """Write the file atomically. Raises CheckpointError if the disk refuses."""
    temporary = path.with_name(f".new-{path.name}")
    try:
        temporary.write_text(json.dumps(costs.numbers(), indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}; free some space, then start again: the run resumes from "
            "its newest checkpoint"
        ) from error


def load_costs(path: Path) -> CostModel:
    """Read a file of `save_costs`. Raises ConfigError for any other content."""
    try:
        costs = CostModel.of(json.loads(path.read_text(encoding="utf-8")))
        step_times(costs), context_time(costs)  # a damaged file cannot be displayed
        for draft in costs.drafts:
            draft_times(draft)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; runs that measure what drafting costs write it, from "
            "their first step on"
        ) from error
    except (ArithmeticError, AssertionError, LookupError, RecursionError, TypeError, ValueError):
        raise ConfigError(
            f"{path}: damaged, or not a cost model; remove it: a run writes it anew after each step"
        ) from None
    return costs


def step_times(costs: CostModel, tokens: Sequence[int] = TOKENS) -> list[StepTime]:
    """Predict steps of some numbers of flat tokens, without the cost of their context."""
    return [
        StepTime(
            tokens=count,
            plain_ms=1000.0 * costs.plain_s(_batch(count)),
            verify_ms=1000.0 * costs.verify_s(_batch(1), count - 1),
        )
        for count in tokens
    ]


def context_time(costs: CostModel) -> str:
    """Describe the cost of context."""
    more = costs.plain_s(_batch(1, context=1000)) - costs.plain_s(_batch(1))
    return f"{1000.0 * more:.3f} ms more for each request with 1000 tokens of context"


def _batch(tokens: int, context: int = 0) -> Batch:
    return Batch(
        num_draftable=tokens,
        num_sampled=tokens,
        num_tokens=tokens,
        num_pairs=tokens * context,
        room=0,
    )


def draft_times(cost: DraftCost) -> str:
    """Describe the cost of a drafter's passes."""
    rounds = ", ".join(
        f"{1000.0 * cost.seconds(requests, _PASSES, _PASSES * requests):.2f} ms for {requests}"
        for requests in (1, 8, 32)
    )
    return (
        f"a pass {1000.0 * cost.level_s:.3f} ms and {1000.0 * cost.row_s:.4f} ms a row; a draft of "
        f"{_PASSES:.0f} tokens {rounds} requests"
    )
