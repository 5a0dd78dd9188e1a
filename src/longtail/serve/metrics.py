"""Prometheus metrics of a service. Each service has its own registry.

The engine thread and the HTTP handlers update counters and histograms; gauges are read on scrape.
"""

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
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


@final
class ServeMetrics:
    """Counters and histograms of a service; `render` exports them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"longtail_{name}", help_text, labels, registry=self._registry)

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"longtail_{name}", help_text, buckets=buckets, registry=self._registry
            )

        self._responses = counter("responses", "HTTP responses started.", "route", "status")
        self.aborted = counter("aborted_completions", "Completions aborted before their end.")
        self.failed = counter("failed_completions", "Completions ended by an error.")
        self.restarts = counter("engine_restarts", "Engines started after one failed.")
        self.weight_updates = counter("weight_updates", "Updates of the weights by a trainer.")
        self._finished = counter("finished_completions", "Completions finished.", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted completions.")
        self._tokens = counter("generated_tokens", "Tokens generated.")
        self._drafted = counter("drafted_tokens", "Draft nodes verified.")
        self._accepted = counter("accepted_tokens", "Draft nodes accepted.")
        self._verified = counter("verify_steps", "Drafts verified.")
        self._steps = histogram("engine_step_seconds", "Engine steps.", _SECONDS)
        self.first_token = histogram(
            "first_token_seconds", "From submission to the first token.", _SECONDS
        )
        self._token = histogram(
            "token_seconds", "Seconds per token of a completion after its first.", _TOKEN_SECONDS
        )
        self._whole = histogram("completion_seconds", "From submission to the end.", _SECONDS)
        self._num_accepted = self._num_verified = 0
        self.add_gauge(
            "accept_length",
            "Tokens per verified draft, since the start.",
            lambda: 1 + self._num_accepted / self._num_verified if self._num_verified else 0.0,
        )

    def add_gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Add a gauge that calls `read` on each scrape."""
        Gauge(f"longtail_{name}", help_text, registry=self._registry).set_function(read)

    def count_response(self, route: str, status: int) -> None:
        """Count a response."""
        self._responses.labels(route, str(status)).inc()

    def count_step(self, report: StepReport) -> None:
        """Count an engine step."""
        self._steps.observe(report.step_s)
        self._tokens.inc(len(report.emitted))
        if report.verified:
            accepted = sum(each.num_accepted for each in report.verified)
            self._drafted.inc(sum(each.num_drafted for each in report.verified))
            self._accepted.inc(accepted)
            self._verified.inc(len(report.verified))
            self._num_accepted += accepted
            self._num_verified += len(report.verified)

    def count_finished(
        self, reason: str, seconds: float, after_first_s: float, num_tokens: int
    ) -> None:
        """Count a finished completion."""
        self._finished.labels(reason).inc()
        self._whole.observe(seconds)
        if num_tokens > 1:
            self._token.observe(after_first_s / (num_tokens - 1))

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
