"""Gains of drafts in vLLM: a line in its log, a warning, gauges in its metrics endpoint."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field, make_dataclass
from typing import Any, final

logger = logging.getLogger("vllm.plugins.longtail")

_EVERY_S = 30.0
"""Seconds of steps in a line, unless weights change."""
_TRIED, _FINE, _NOTHING = 100, 0.2, 0.02
"""Drafted tokens that tell; accepted shares that are fine, and nothing."""
_REMEDY = (
    "new weights outdate a drafter, and sleep level 2 discards its own; a learned one follows by "
    "itself, load those of another again"
)
_GAUGES = ("steps_drafted", "steps_plain", "step_seconds", "seconds_saved", "draft_depth")
"""Sums since the start that vLLM itself has not, and the depth of the last step."""
_LIKE = {"labelnames": ["model_name", "engine"], "multiprocess_mode": "mostrecent"}
_SHOWN: dict[str, Any] = {}
"""Gauges of this process in vLLM's metrics endpoint."""


@final
class Gains:
    """Counts what the steps of a scheduler took and yielded."""

    def __init__(self) -> None:
        self._usual = 0.0
        self._tokens, self._compared, self._drafts = 0, False, Counter[tuple[int, int]]()
        self.gauges = dict.fromkeys(_GAUGES, 0.0)
        self._since = self.gauges.copy()

    def add(
        self, drafts: Sequence[tuple[int, int]], tokens: int, seconds: float, saved_s: float | None
    ) -> None:
        """Count a step; `drafts` has the drafted and the accepted tokens of each."""
        self.gauges["steps_drafted" if drafts else "steps_plain"] += 1
        self.gauges["step_seconds"] += seconds
        self.gauges["seconds_saved"] += saved_s or 0.0
        self.gauges["draft_depth"] = max(drafts, default=(0, 0))[0]
        self._tokens += tokens
        self._compared |= saved_s is not None
        self._drafts.update(drafts)
        if self.gauges["step_seconds"] - self._since["step_seconds"] >= _EVERY_S:
            self.log()

    def log(self) -> None:
        """Write a line about the steps since the last one; warn when drafts stand no more."""
        tried, stood = Counter[int](), Counter[int]()  # by the place in a draft
        for (drafted, accepted), times in self._drafts.items():
            tried.update(dict.fromkeys(range(drafted), times))
            stood.update(dict.fromkeys(range(accepted), times))
        if self._tokens:
            steps, plain, seconds, gain = (self.gauges[n] - self._since[n] for n in _GAUGES[:4])
            shares = ", ".join(f"{stood[at] / tried[at]:.2f}" for at in sorted(tried)) or "none"
            saved = f"{gain:.1f} s saved against plain steps"
            logger.info(
                "longtail: %s tokens in %.0f s, accept length %.2f (by depth: %s), "
                "%.0f %% of steps drafted, %s",
                f"{self._tokens:,}", seconds, 1 + stood.total() / max(tried[0], 1), shares,
                100 * steps / (steps + plain),
                saved if self._compared else "no plain step was seen to compare with",
            )  # fmt: skip
        self._since, self._tokens, self._compared = self.gauges.copy(), 0, False
        if (all_tried := tried.total()) < _TRIED:
            return  # they join the next ones
        self._drafts.clear()
        share = stood.total() / all_tried
        if share < _NOTHING and self._usual:
            was = f"{stood.total()} of {all_tried} drafted tokens were accepted"
            logger.warning("longtail: %s, %.0f %% before: %s", was, self._usual, _REMEDY)
            self._usual = 0.0
        elif share > _FINE:
            self._usual = 100 * share


def carry_gauges() -> None:
    """Give vLLM's SchedulerStats a field for them; a process without the plugin leaves it out."""
    from vllm.v1.metrics.stats import SchedulerStats as Stats

    new = ("longtail", dict[str, float] | None, field(default=None, init=False))
    made: Any = make_dataclass("Gauges", [new])
    Stats.__dataclass_fields__ |= made.__dataclass_fields__
    Stats.__annotations__ |= made.__annotations__
    Stats.longtail = None


def record(
    stock: Callable[..., None], self: Any, scheduler_stats: Any, *args: Any, **options: Any
) -> None:
    """Set the gauges, too, in PrometheusStatLogger.record."""
    stock(self, scheduler_stats, *args, **options)
    labels = self.vllm_config.model_config.served_model_name, options.get("engine_idx", 0)
    for name, value in (getattr(scheduler_stats, "longtail", None) or {}).items():
        if name not in _SHOWN:
            _SHOWN[name] = self._gauge_cls(f"longtail:{name}", "See docs/vllm.md", **_LIKE)
        _SHOWN[name].labels(*labels).set(value)
