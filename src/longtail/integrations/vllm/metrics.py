"""Metrics of drafting in vLLM's own Prometheus registry and in its log line.

    vllm:longtail_accept_length            tokens per verification step with the present drafter
    vllm:longtail_previous_accept_length   the same with the drafter before it; 0 without one
    vllm:longtail_drafter_adoptions_total  drafters adopted while running

They stand beside vLLM's own counters of drafts, in the process of the front end, with its labels.
A vLLM whose metrics have another form keeps its own alone: texts do not depend on them.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, final
from weakref import WeakSet

from longtail.integrations.vllm.adopt import METHOD, Adoption, adoption
from longtail.integrations.vllm.guards import Patch, Signature, check, class_of, names

logger = logging.getLogger("vllm.plugins.longtail")
_PROM_INIT = Signature(
    first=names("self", "speculative_config", "labelnames", "per_engine_labelvalues"),
    then=("is_diffusion",),
)
_PROM_OBSERVE = Signature(first=names("self", "spec_decoding_stats"), then=("engine_idx",))
_LOG_OBSERVE = Signature(first=names("self", "spec_decoding_stats"))
_LOG = Signature(first=names("self", "log_fn"))
_RPC = Signature(first=names("self", "method"), then=("timeout", "args", "kwargs"))


@final
@dataclass(slots=True)
class Accepted:
    """Verification steps and accepted drafts with one drafter."""

    num_steps: int = 0
    num_accepted: int = 0

    @property
    def length(self) -> float:
        """Tokens per verification step, the bonus token included; 0 before the first step."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else 0.0


@final
@dataclass(slots=True, eq=False, weakref_slot=True)
class Counts:
    """Counts of one observer since the present drafter was adopted, and with the one before."""

    present: Accepted = field(default_factory=Accepted)
    previous: Accepted = field(default_factory=Accepted)
    adopted: Adoption | None = None
    _num_new: int = 0
    """Adoptions that are not exported yet."""

    def observe(self, stats: Any) -> None:
        """Add vLLM's statistics of one step."""
        self.present.num_steps += stats.num_drafts
        self.present.num_accepted += stats.num_accepted_tokens

    def adopt(self, adopted: Adoption) -> None:
        """Begin to count for a new drafter."""
        self.previous, self.present = self.present, Accepted()
        self.adopted = adopted
        self._num_new += 1

    def take_new_adoptions(self) -> int:
        """Return the number of adoptions since the last call."""
        new, self._num_new = self._num_new, 0
        return new

    def line(self) -> str:
        """Return the words for the log line."""
        said = f"longtail: drafts verified by equality, accept length {self.present.length:.2f}"
        if self.adopted is None:
            return said
        version = "" if self.adopted.version is None else f", version {self.adopted.version}"
        return (
            f"{said} with the drafter of {self.adopted.source} ({self.adopted.digest[:12]}"
            f"{version}), {self.previous.length:.2f} with the one before"
        )


_all: WeakSet[Counts] = WeakSet()


def patches() -> list[Patch]:
    """Return the extensions of vLLM's metrics; ConfigError if a function is not a known one."""
    place = "vllm.v1.spec_decode.metrics"
    prom, log = class_of(place, "SpecDecodingProm"), class_of(place, "SpecDecodingLogging")
    sync = class_of("vllm.v1.engine.llm_engine", "LLMEngine")
    found = {
        (prom, "__init__"): _registering(check(prom, "__init__", _PROM_INIT)),
        (prom, "observe"): _exporting(check(prom, "observe", _PROM_OBSERVE)),
        (log, "observe"): _counting(check(log, "observe", _LOG_OBSERVE)),
        (log, "log"): _logging(check(log, "log", _LOG)),
        (sync, "collective_rpc"): _calling(check(sync, "collective_rpc", _RPC)),
    }
    serving = class_of("vllm.v1.engine.async_llm", "AsyncLLM")
    call = _calling_async(check(serving, "collective_rpc", _RPC))
    found[serving, "collective_rpc"] = call
    return [
        Patch(owner=owner, name=name, replacement=made) for (owner, name), made in found.items()
    ]


def record(adopted: Adoption) -> None:
    """Begin to count for a new drafter in every observer of this process."""
    for counts in _all:
        counts.adopt(adopted)


def _counts_of(holder: Any, engine: int = 0) -> Counts:
    """Return the counts of one observer of vLLM for one engine."""
    counts: dict[int, Counts] = vars(holder).setdefault("longtail_counts", {})
    if engine not in counts:
        counts[engine] = Counts()
        _all.add(counts[engine])
    return counts[engine]


# ---- Prometheus


def _registering(stock: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(stock)

    @wraps(stock)
    def init(self: Any, *args: Any, **options: Any) -> None:
        stock(self, *args, **options)
        given = signature.bind(self, *args, **options).arguments
        self.longtail_metrics = {}
        if given["speculative_config"] is not None:
            rows = given["per_engine_labelvalues"]
            self.longtail_metrics = _metrics(given["labelnames"], rows)

    return init


def _metrics(names_: list[str], rows: Mapping[int, list[object]]) -> dict[int, tuple[Any, ...]]:
    """Register gauges and the counter; return those of each engine."""
    from prometheus_client import Counter, Gauge

    made: tuple[Any, ...] = (
        Gauge(
            "vllm:longtail_accept_length",
            "Tokens per verification step with the present drafter.",
            labelnames=names_,
            multiprocess_mode="mostrecent",
        ),
        Gauge(
            "vllm:longtail_previous_accept_length",
            "Tokens per verification step with the drafter before the present one.",
            labelnames=names_,
            multiprocess_mode="mostrecent",
        ),
        Counter(
            "vllm:longtail_drafter_adoptions",
            "Number of drafters adopted while running.",
            labelnames=names_,
        ),
    )
    return {engine: tuple(each.labels(*row) for each in made) for engine, row in rows.items()}


def _exporting(stock: Callable[..., None]) -> Callable[..., None]:
    @wraps(stock)
    def observe(self: Any, spec_decoding_stats: Any, engine_idx: int = 0) -> None:
        stock(self, spec_decoding_stats, engine_idx)
        counts = _counts_of(self, engine_idx)
        counts.observe(spec_decoding_stats)
        if engine_idx in getattr(self, "longtail_metrics", {}):
            present, previous, adoptions = self.longtail_metrics[engine_idx]
            present.set(counts.present.length)
            previous.set(counts.previous.length)
            adoptions.inc(counts.take_new_adoptions())

    return observe


# ---- the log


def _counting(stock: Callable[..., None]) -> Callable[..., None]:
    @wraps(stock)
    def observe(self: Any, spec_decoding_stats: Any) -> None:
        stock(self, spec_decoding_stats)
        _counts_of(self).observe(spec_decoding_stats)

    return observe


def _logging(stock: Callable[..., None]) -> Callable[..., None]:
    @wraps(stock)
    def log(self: Any, log_fn: Callable[..., None] = logger.info) -> None:
        """Write vLLM's line about drafts, then longtail's."""
        drafted = bool(self.num_drafts)
        stock(self, log_fn=log_fn)
        if drafted:
            log_fn(_counts_of(self).line())

    return log


# ---- adoptions


def _calling(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def collective_rpc(self: Any, method: Any, *args: Any, **options: Any) -> Any:
        answers = stock(self, method, *args, **options)
        if method == METHOD:
            record(adoption(answers))
        return answers

    return collective_rpc


def _calling_async(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    async def collective_rpc(self: Any, method: Any, *args: Any, **options: Any) -> Any:
        answers = await stock(self, method, *args, **options)
        if method == METHOD:
            record(adoption(answers))
        return answers

    return collective_rpc
