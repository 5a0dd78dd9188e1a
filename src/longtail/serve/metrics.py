"""What a service counts, for Prometheus. Each service has a registry of its own.

Counters and histograms are fed by the engine's thread and by the HTTP side; gauges are read when
somebody asks.
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
    """Counts; `render` writes them down."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own = self._registry
        ProcessCollector(registry=own)
        self._responses = Counter(
            "longtail_responses", "HTTP responses begun.", ("route", "status"), registry=own
        )
        self._aborted = Counter(
            "longtail_aborted_completions", "Completions given up before their end.", registry=own
        )
        self._failed = Counter(
            "longtail_failed_completions", "Completions ended by an error.", registry=own
        )
        self._restarts = Counter(
            "longtail_engine_restarts", "Engines started in place of one that failed.", registry=own
        )
        self._finished = Counter(
            "longtail_finished_completions", "Completions written.", ("reason",), registry=own
        )
        self._prompt_tokens = Counter(
            "longtail_prompt_tokens", "Tokens of prompts that were taken on.", registry=own
        )
        self._tokens = Counter("longtail_generated_tokens", "Tokens written.", registry=own)
        self._drafted = Counter("longtail_drafted_tokens", "Draft nodes verified.", registry=own)
        self._accepted = Counter("longtail_accepted_tokens", "Draft nodes accepted.", registry=own)
        self._verified = Counter("longtail_verify_steps", "Drafts verified.", registry=own)
        self._accept_length = Gauge(
            "longtail_accept_length",
            "Tokens a verified draft led to, since the start.",
            registry=own,
        )
        self._steps = Histogram(
            "longtail_engine_step_seconds", "Engine steps.", buckets=_SECONDS, registry=own
        )
        self._first = Histogram(
            "longtail_first_token_seconds", "From taken on to the first token.", buckets=_SECONDS,
            registry=own,
        )  # fmt: skip
        self._each = Histogram(
            "longtail_token_seconds", "A completion's seconds a token after its first.",
            buckets=_TOKEN_SECONDS, registry=own,
        )  # fmt: skip
        self._whole = Histogram(
            "longtail_completion_seconds",
            "From taken on to the end.",
            buckets=_SECONDS,
            registry=own,
        )
        self._sums = [0, 0]

    def watch(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read when somebody asks."""
        Gauge(name, help_text, registry=self._registry).set_function(read)

    def answered(self, route: str, status: int) -> None:
        """Count a response."""
        self._responses.labels(route, str(status)).inc()

    def admitted(self, prompt_len: int) -> None:
        """Count a completion that was taken on."""
        self._prompt_tokens.inc(prompt_len)

    def stepped(self, report: StepReport) -> None:
        """Count an engine step."""
        self._steps.observe(report.step_s)
        self._tokens.inc(len(report.emitted))
        if report.verified:
            accepted = sum(each.num_accepted for each in report.verified)
            self._drafted.inc(sum(each.num_drafted for each in report.verified))
            self._accepted.inc(accepted)
            self._verified.inc(len(report.verified))
            self._sums = [self._sums[0] + accepted, self._sums[1] + len(report.verified)]
            self._accept_length.set(1 + self._sums[0] / self._sums[1])

    def began(self, seconds: float) -> None:
        """Count a first token."""
        self._first.observe(seconds)

    def finished(self, reason: str, seconds: float, after_first_s: float, num_tokens: int) -> None:
        """Count a completion that came to its end."""
        self._finished.labels(reason).inc()
        self._whole.observe(seconds)
        if num_tokens > 1:
            self._each.observe(after_first_s / (num_tokens - 1))

    def aborted(self) -> None:
        """Count a completion that was given up."""
        self._aborted.inc()

    def failed(self) -> None:
        """Count a completion that an error ended."""
        self._failed.inc()

    def restarted(self) -> None:
        """Count an engine that was started in place of one that failed."""
        self._restarts.inc()

    def render(self) -> bytes:
        """Write everything in Prometheus' text format."""
        return generate_latest(self._registry)
