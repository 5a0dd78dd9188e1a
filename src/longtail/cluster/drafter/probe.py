"""Acceptance of a given drafter on the policy at hand, measured before a run begins.

A few texts are generated without drafts, by an engine of their own, so that the run's cost model,
noise and KV are untouched. Then the drafter is evaluated on them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.drafter.training.texts import pack_texts
from longtail.drafter.training.trainer import DrafterTrainer, TrainerSettings
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.model.hf.tokenizer import Tokenizer
from longtail.rl.data.examples import Example
from longtail.types import Request

PAYS_BELOW = 0.95
"""Share of the accept length in training below which further training is worth its time."""
PROBED_DEPTHS = 6
"""Depth to which a drafter is measured in training, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Acceptance of a drafter on new texts of the policy, and when it was trained.

    Example: Probe(accept_len=3.1, trained_accept_len=4.4, trained_on="base", num_tokens=512)
    """

    accept_len: float
    """Expected accept length of a chain; NaN if no text was long enough."""
    trained_accept_len: float | None
    """Expected accept length on held-out texts in training; None if unknown."""
    trained_on: str
    num_tokens: int

    @property
    def would_pay(self) -> bool:
        """Whether the drafter has lost enough acceptance that training it would pay."""
        known = self.trained_accept_len
        return known is not None and self.accept_len < PAYS_BELOW * known

    def lines(self, training: str) -> list[str]:
        """Return the log lines; `training` is the run's spot.train."""
        if math.isnan(self.accept_len):
            return []
        known = self.trained_accept_len
        then = "" if known is None else f", {known:.2f} where it was trained ({self.trained_on})"
        found = [
            f"drafter: expected accept length {self.accept_len:.2f} on {self.num_tokens} tokens of "
            f"this policy{then}"
        ]
        if self.would_pay:
            cure = {"never": "set spot.train = spot", "spot": "it is trained while workers idle"}
            found.append(
                "warning: the drafter has lost acceptance on this policy, so training it would "
                f"pay: {cure.get(training, 'it is trained after each rollout')}; or beforehand, "
                "with longtail drafter train --drafter.init"
            )
        return found


def probe(
    given: LoadedDrafter, engine: RolloutEngine, tokenizer: Tokenizer, requests: Sequence[Request]
) -> Probe:
    """Measure a drafter on texts that another engine generates with the policy of `engine`."""
    model = engine.model
    longest = max(len(each.prompt_tokens) + each.sampling.max_tokens for each in requests)
    limits = EngineLimits(max_running=len(requests), max_step_tokens=512, max_len=longest)
    completions = RolloutEngine(model, tokenizer.decode, limits).generate(requests)
    texts = [
        Example(tokens=request.prompt_tokens + done.tokens, prompt_len=len(request.prompt_tokens))
        for request, done in zip(requests, completions, strict=True)
    ]
    reader = DrafterTrainer(
        given.layer, model, TrainerSettings(), draft_ids=given.draft_ids, head=given.head
    )
    depths = reader.evaluate(pack_texts(texts, limits.max_step_tokens), PROBED_DEPTHS)
    return Probe(
        accept_len=depths.accept_len if depths.overlap else math.nan,
        trained_accept_len=given.training.accept_len,
        trained_on=given.trained_on.name,
        num_tokens=sum(len(done.tokens) for done in completions),
    )
