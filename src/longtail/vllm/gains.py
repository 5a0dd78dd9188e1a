"""Gains of drafts in vLLM: a line in its log, a warning, gauges in its metrics endpoint."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from typing import Any, final

logger = logging.getLogger("vllm.plugins.longtail")

_EVERY_S = 30.0
"""Seconds of steps in a line, unless weights change."""
_TRIED, _FINE, _NOTHING = 100, 0.2, 0.02
"""Least drafted tokens of a line that judges them; accepted shares that are fine, and nothing."""
_REMEDIES = (
    "new weights outdate a drafter, and sleep level 2 discards its own: load them again",
    "if weights have changed, the drafter learns the new ones from the texts to come",
)
"""Sentence for a drafter with weights of its own, and for one that learns."""
_GAUGES = ("steps_drafted", "steps_plain", "step_seconds", "seconds_saved", "draft_depth")
"""Sums since the start that vLLM itself has not, and the depth of the last step."""
_LABELS = ("model_name", "engine")


@final
class Gains:
    """Counts what the steps of a scheduler took and yielded."""

    def __init__(self, *, learns: bool) -> None:
        self._remedy, self._usual = _REMEDIES[learns], 0.0
        self.gauges = dict.fromkeys(_GAUGES, 0.0)
        self._begin()

    def _begin(self) -> None:
        self._since, self._tokens, self._compared = self.gauges.copy(), 0, 0
        self._tried, self._stood = Counter[int](), Counter[int]()  # by the place in a draft

    def add(
        self, drafts: Sequence[tuple[int, int]], tokens: int, seconds: float, saved_s: float | None
    ) -> None:
        """Count a step; `drafts` has the drafted and the accepted tokens of each."""
        self.gauges["steps_drafted" if drafts else "steps_plain"] += 1
        self.gauges["step_seconds"] += seconds
        self.gauges["seconds_saved"] += saved_s or 0.0
        self.gauges["draft_depth"] = max((drafted for drafted, _ in drafts), default=0)
        self._tokens += tokens
        self._compared += saved_s is not None
        for drafted, accepted in drafts:
            self._tried.update(range(drafted))
            self._stood.update(range(accepted))
        if self.gauges["step_seconds"] - self._since["step_seconds"] >= _EVERY_S:
            self.log()

    def log(self) -> None:
        """Write a line about the steps since the last one; warn when drafts stand no more."""
        tried, stood = self._tried.total(), self._stood.total()
        if self._tokens:
            drafted, plain, seconds, gain = (self.gauges[n] - self._since[n] for n in _GAUGES[:4])
            shares = ", ".join(f"{self._stood[at] / self._tried[at]:.2f}" for at in self._tried)
            length = f"{1 + stood / max(self._tried[0], 1):.2f} (by depth: {shares or 'none'})"
            saved = f"{gain:.1f} s saved against plain steps"
            logger.info(
                "longtail: %s tokens in %.0f s, accept length %s, %.0f %% of steps drafted, %s",
                f"{self._tokens:,}", seconds, length, 100 * drafted / (drafted + plain),
                saved if self._compared else "no plain step was seen to compare with",
            )  # fmt: skip
        if tried >= _TRIED and stood > _FINE * tried:
            self._usual = stood / tried
        elif tried >= _TRIED and stood < _NOTHING * tried and self._usual:
            was = f"{stood} of {tried} drafted tokens were accepted, {self._usual:.0%} before"
            logger.warning("longtail: %s: %s", was, self._remedy)
            self._usual = 0.0
        self._begin()


def carry_gauges() -> None:
    """Give vLLM's SchedulerStats a field for them, in the scheduler's process and the front end."""
    from vllm.v1.metrics.stats import SchedulerStats as Stats

    made: Any = make_dataclass("Gauges", [("longtail", dict[str, float] | None, None)])
    Stats.__dataclass_fields__ |= made.__dataclass_fields__
    Stats.__annotations__ |= made.__annotations__
    Stats.longtail = None


def around_record(stock: Callable[..., None]) -> Callable[..., None]:
    """Return what sets the gauges, too, for PrometheusStatLogger.record."""
    from prometheus_client import Gauge  # vLLM requires it

    carry_gauges()
    like: dict[str, Any] = {"labelnames": _LABELS, "multiprocess_mode": "mostrecent"}
    gauges = {name: Gauge(f"longtail:{name}", "See docs/vllm.md", **like) for name in _GAUGES}

    def record(self: Any, stats: Any, *args: Any, engine_idx: int = 0, **options: Any) -> None:
        stock(self, stats, *args, engine_idx=engine_idx, **options)
        model = self.vllm_config.model_config.served_model_name
        for name, value in (getattr(stats, "longtail", None) or {}).items():
            gauges[name].labels(model, engine_idx).set(value)

    return record
