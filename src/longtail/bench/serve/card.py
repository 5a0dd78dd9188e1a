"""The card of `longtail bench serve`."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from longtail.bench.common.card import Table, numbers
from longtail.bench.common.process import pinned
from longtail.bench.serve.measure import Point, Turn
from longtail.bench.serve.options import ServeBenchOptions
from longtail.bench.serve.peer import Rival


def tables(options: ServeBenchOptions, cpus: Sequence[int], points: Sequence[Point]) -> list[Table]:
    """Return the throughput of all clients together, and the latency of one."""
    common: dict[str, Callable[[Point], object]] = {
        "model, temperature": lambda point: point.name,
        "clients": lambda point: point.clients,
    }
    return [
        Table(
            f"Serving over HTTP, {options.threads} thread ({pinned(cpus)}), completions of at most "
            f"{options.tokens} tokens, {options.repeats} turns, without drafts (off) and with "
            "drafts (on); median (lowest-highest)",
            common
            | {
                "off tok/s": lambda point: f"{_speed(point.off):,.0f}",
                "on tok/s": lambda point: f"{_speed(point.on):,.0f}",
                "on / off": lambda point: point.throughput_ratio,
                "texts differ": lambda point: f"{point.differing_share:.1%}",
            },
            points,
        ),
        Table(
            "Latency of a client",
            common
            | {
                "off ms/token": lambda point: _token_ms(point.off),
                "on ms/token": lambda point: _token_ms(point.on),
                "off / on": lambda point: point.latency_speedup,
                "first token, on / off": lambda point: point.first_token_ratio,
            },
            points,
        ),
    ]


def as_json(
    options: ServeBenchOptions, points: Sequence[Point], rivals: Mapping[str, Rival]
) -> dict[str, Any]:
    """Return every figure; ratios are of turns made one right after the other."""
    few, many = min(options.clients), max(options.clients)
    alone = [point for point in points if point.clients == few]
    crowd = [point for point in points if point.clients == many]
    return {
        "bench": "serve",
        "clients": list(options.clients),
        "tokens": options.tokens,
        "repeats": options.repeats,
        "latency_speedup": numbers({each.name: each.latency_speedup for each in alone}),
        "first_token_ratio": numbers({each.name: each.first_token_ratio for each in alone}),
        f"throughput_ratio_{many}": numbers({each.name: each.throughput_ratio for each in crowd}),
        "peer_ratio": numbers({name: rival.ratio for name, rival in rivals.items()}),
        "peer_absent": {name: rival.reason for name, rival in rivals.items() if rival.reason},
        "differing_share": max(point.differing_share for point in points),
        "points": [
            {
                "cell": point.name,
                "clients": point.clients,
                "tokens_per_s": {"off": _speed(point.off), "on": _speed(point.on)},
                "token_ms": {"off": _token_ms(point.off), "on": _token_ms(point.on)},
                "first_ms": {"off": _first_ms(point.off), "on": _first_ms(point.on)},
                "throughput_ratio": point.throughput_ratio.numbers(),
            }
            for point in points
        ],
    }


def _speed(turns: Sequence[Turn]) -> float:
    return median(turn.tokens_per_s for turn in turns)


def _token_ms(turns: Sequence[Turn]) -> float:
    return 1e3 * median(turn.token_s for turn in turns)


def _first_ms(turns: Sequence[Turn]) -> float:
    return 1e3 * median(turn.first_s for turn in turns)
