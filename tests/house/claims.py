"""Numbers that pages state, each with the card that holds it.

`text` is built from the card, so a new measurement changes it. A test then names the page that must
follow.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from house.tree import ROOT

Number = float | Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A number of a card, and the pages that state it.

    Example: Claim(card="e2e_quickstart", path="step_speedup.spot", pages=("README.md",))
    """

    card: str
    """Name of the card, without its ending."""
    path: str
    """Keys that lead to the number, joined by dots; a number is an index of a list."""
    pages: tuple[str, ...]
    form: str = "{median:.2f}x ({low:.2f}-{high:.2f})"
    """Text of the number; `value` if it is no spread."""

    @property
    def value(self) -> Number:
        """The number in the card."""
        found: Any = json.loads((ROOT / "benchmarks" / f"{self.card}.json").read_text())
        for key in self.path.split("."):
            found = found[int(key)] if isinstance(found, list) else found[key]
        return found

    @property
    def text(self) -> str:
        """The number as pages state it."""
        value = self.value
        return self.form.format(**value) if isinstance(value, Mapping) else self.form.format(value)


_README, _BENCHMARKS, _START = "README.md", "docs/benchmarks.md", "docs/start.md"
_RATIO = "{median:.2f}x"
_BARE = "{median:.2f} ({low:.2f}-{high:.2f})"

ROWS = (
    Claim(card="e2e_quickstart", path="step_speedup.spot", pages=(_README,)),
    Claim(card="e2e_quickstart", path="rollout_speedup.spot", pages=(_README,)),
    Claim(card="e2e_smollm2", path="step_speedup.spot", pages=(_README,)),
)
"""Rows of README's table of results, in their order."""
CLAIMS = (
    *ROWS,
    Claim(card="e2e_smollm2", path="step_speedup.spot",
          pages=(_BENCHMARKS, _START, "docs/comparison.md")),
    Claim(card="e2e_smollm2_cold", path="step_speedup.cold",
          pages=(_BENCHMARKS, _START, "docs/comparison.md")),
    Claim(card="e2e_smollm2", path="step_speedup.frozen", pages=(_BENCHMARKS,)),
    Claim(card="e2e_smollm2", path="rollout_speedup.frozen", pages=(_BENCHMARKS,)),
    Claim(card="e2e_smollm2", path="rollout_speedup.spot", pages=(_BENCHMARKS,)),
    Claim(card="e2e_smollm2_cold", path="rollout_speedup.cold", pages=(_BENCHMARKS,)),
    Claim(card="e2e_smollm2_cold", path="step_speedup.cold", pages=(_README,), form=_RATIO),
    Claim(card="e2e_smollm2_16", path="rollout_speedup.frozen", pages=(_BENCHMARKS,)),
    Claim(card="e2e_smollm2_16", path="rollout_speedup.spot", pages=(_BENCHMARKS,)),
    Claim(card="e2e_smollm2", path="rollout_speedup.spot", pages=(_README,), form=_RATIO),
    Claim(card="e2e_smollm2", path="step_speedup.spot", pages=(_README,), form=_RATIO),
    Claim(card="tuner_smollm2", path="spreads.worst_vs_best_fixed", pages=(_BENCHMARKS,),
          form=_BARE),
    Claim(card="vllm_rules_smollm2", path="accept_length.coupled",
          pages=(_BENCHMARKS, "docs/ideas/coupled-drafts.md"), form="{:.2f}"),
    Claim(card="vllm_rules_smollm2", path="accept_length.greedy",
          pages=(_BENCHMARKS, "docs/ideas/coupled-drafts.md"), form="{:.2f}"),
    Claim(card="vllm_rules_smollm2", path="throughput_ratio.coupled", pages=(_BENCHMARKS,),
          form=_BARE),
    Claim(card="trl_smollm2", path="generation_ratio_none", pages=(_BENCHMARKS, "docs/trl.md"),
          form="{:.1f}x"),
    Claim(card="trl_smollm2", path="step_ratio_none", pages=(_BENCHMARKS, "docs/trl.md"),
          form="{:.2f}x"),
    Claim(card="rollout_sums", path="speedup.runs/quickstart.drafter.1",
          pages=("README.md", _BENCHMARKS), form="{:.2f}x"),
    Claim(card="engine_smollm2", path="vllm_cpu_ratio.smollm2.1", pages=(_BENCHMARKS,),
          form="{:.2f}x"),
    Claim(card="engine_smollm2", path="vllm_cpu_ratio.smollm2.64", pages=(_BENCHMARKS,),
          form="{:.2f}x"),
    Claim(card="engine_smollm2", path="generate_ratio.smollm2.1", pages=(_BENCHMARKS,),
          form="{:.2f}x"),
    Claim(card="engine_smollm2", path="generate_ratio.smollm2.64", pages=(_BENCHMARKS,),
          form="{:.2f}x"),
    Claim(card="rollout_sums", path="speedup.runs/quickstart.drafter.2", pages=(_BENCHMARKS,),
          form="{:.2f}x"),
    Claim(card="learner_smollm2_64", path="over_products", pages=(_BENCHMARKS,)),
    Claim(card="learner_smollm2_64", path="transformers_ratio", pages=(_BENCHMARKS,)),
    Claim(card="learner_smollm2", path="over_products", pages=(_BENCHMARKS,)),
    Claim(card="learner_smollm2", path="transformers_ratio", pages=(_BENCHMARKS,)),
    Claim(card="learner_smollm2", path="trl_ratio", pages=(_BENCHMARKS,)),
    Claim(card="e2e_quickstart", path="step_speedup.spot", pages=(_BENCHMARKS,), form=_BARE),
    Claim(card="e2e_quickstart", path="rollout_speedup.spot", pages=(_BENCHMARKS,), form=_BARE),
    Claim(card="e2e_quickstart_avx2", path="step_speedup.spot", pages=(_BENCHMARKS,), form=_BARE),
    Claim(card="e2e_quickstart_avx2", path="rollout_speedup.spot", pages=(_BENCHMARKS,),
          form=_BARE),
    Claim(card="rollout_sums", path="speedup.runs/quickstart.drafter.4",
          pages=("README.md", _BENCHMARKS), form="{:.2f}x"),
    Claim(card="rollout_sums", path="speedup.runs/quickstart.drafter.8", pages=(_BENCHMARKS,),
          form="{:.2f}x"),
    Claim(card="quickstart", path="length_p50", pages=(_START,), form="length p50 {:.0f} "),
    Claim(card="quickstart", path="length_max", pages=(_START,), form="max {:.0f} "),
    Claim(card="quickstart", path="accept_length", pages=(_START,), form="accept {:.2f}"),
    Claim(card="quickstart", path="tail_idle_share", pages=(_START,), form="tail idle {:.0%}"),
    Claim(card="quickstart", path="reward_before", pages=(_BENCHMARKS,), form="{:.3f} before"),
    Claim(card="quickstart", path="reward_after", pages=(_BENCHMARKS,), form="{:.3f} after"),
)  # fmt: skip
