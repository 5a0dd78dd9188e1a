"""Prometheus metrics of a service. Each service has its own registry."""

from collections.abc import Callable
from typing import final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from longtail.engine.report import StepReport

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


@final
class ServeMetrics:
    """Counters and histograms of a service; `render` exports them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"longtail_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"longtail_{name}", text, buckets=_SECONDS, registry=self._registry)

        self.aborted = counter("aborted_completions", "Completions aborted before their end.")
        self.failed = counter("failed_completions", "Completions ended by an error.")
        self.finished = counter("finished_completions", "Completions finished.", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted completions.")
        self._tokens = counter("generated_tokens", "Tokens generated.")
        self._drafted = counter("drafted_tokens", "Draft nodes verified.")
        self._accepted = counter("accepted_tokens", "Draft nodes accepted.")
        self._verified = counter("verify_steps", "Drafts verified.")
        self._step = histogram("engine_step_seconds", "Engine steps.")
        self.first_token = histogram("first_token_seconds", "From a call to its first token.")
        self.completion = histogram("completion_seconds", "From a call to a completion's end.")

    def count_step(self, report: StepReport) -> None:
        """Count an engine step."""
        self._step.observe(report.step_s)
        self._tokens.inc(len(report.emitted))
        self._drafted.inc(sum(each.num_drafted for each in report.verified))
        self._accepted.inc(sum(each.num_accepted for each in report.verified))
        self._verified.inc(len(report.verified))

    def add_gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge that calls `read` on each scrape."""
        Gauge(f"longtail_{name}", text, registry=self._registry).set_function(read)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
