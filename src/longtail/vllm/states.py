"""The target's last states in vLLM's V1 model runner, for a drafter that learns from sums.

The runner computes them in each step and passes them to its drafter and its head. They are noted on
the way, so learning takes no pass of its own. The runner must be in this process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from longtail.engine.request import ActiveRequest
from longtail.errors import ConfigError
from longtail.speculation.drafter import Observed, Statistics
from longtail.vllm.guards import TESTED, check


@dataclass(slots=True)
class Scheduled:
    """Tokens that a step computes, by our request ids."""

    counts: dict[str, int] = field(default_factory=dict)
    """Number of flat tokens of each request."""
    drafts: dict[str, int] = field(default_factory=dict)
    """Number of verified tokens of each request that has some."""
    starts: dict[str, int] = field(default_factory=dict)
    """Number of tokens of each request in the KV cache before the step."""

    @staticmethod
    def of(output: Any, names: Mapping[str, str]) -> "Scheduled":
        """Read a scheduler's output; `names` are our ids by vLLM's."""
        drafts = output.scheduled_spec_decode_tokens
        cached = output.scheduled_cached_reqs
        starts = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return Scheduled(
            counts=_named(output.num_scheduled_tokens, names),
            drafts=_named({name: len(each) for name, each in drafts.items() if each}, names),
            starts=_named(starts, names),
        )


def _named(numbers: Mapping[str, int], names: Mapping[str, str]) -> dict[str, int]:
    """Return numbers by our ids; an aborted request has vLLM's."""
    return {names.get(name, name): number for name, number in numbers.items()}


@final
class StateReader:
    """Gives the states of accepted tokens to `texts`."""

    def __init__(self, engine: Any, texts: Statistics) -> None:
        (runner, *others) = engine.collective_rpc(_runner)
        if others or not hasattr(runner, "input_batch"):
            raise ConfigError(
                "speculation.drafter: a drafter that learns from sums needs vLLM's V1 model runner "
                f"in one process (vLLM {TESTED} on a CPU); give a trained EAGLE drafter, or history"
            )
        stock = check(runner, "sample_tokens", "grammar_output")
        self._texts, self._order = texts, list[str]()
        self._states: Tensor | None = None

        def sample_tokens(grammar_output: Any) -> Any:
            if runner.execute_model_state is not None and texts.is_on:
                self._states = runner.execute_model_state.hidden_states
                self._order = list(runner.input_batch.req_ids)
            return stock(grammar_output)

        runner.sample_tokens = sample_tokens

    def read(
        self,
        step: Scheduled,
        accepted: Mapping[str, int],
        texts: Mapping[str, ActiveRequest],
        names: Mapping[str, str],
    ) -> None:
        """Observe a step's accepted tokens, which `texts` have already."""
        states, self._states = self._states, None
        if states is None:
            return
        rows, seen, first = [], [], 0
        for name in (names.get(each, each) for each in self._order):
            count = step.counts.get(name, 0)
            kept = count - step.drafts.get(name, 0) + accepted.get(name, 0)
            if name in texts and kept:
                rows.append(states[first : first + kept])
                seen.append(
                    Observed(
                        request_id=name,
                        tokens=texts[name].tokens,
                        start=step.starts[name],
                        num_tokens=kept,
                        prompt_len=texts[name].prompt_len,
                        is_finished=texts[name].is_finished,
                    )
                )
            first += count
        if seen:
            self._texts.observe(seen, torch.cat(rows))


def _runner(worker: Any) -> Any:
    return worker.model_runner
