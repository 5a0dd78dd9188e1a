"""How `longtail bench serve` shows its points: tables for people, one object for programs."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from longtail.bench.serve.measure import Point, Turn
from longtail.bench.serve.options import Setting
from longtail.bench.serve.peer import Rival

Table = tuple[str, tuple[str, ...], list[list[str]]]


def tables(setting: Setting, points: Sequence[Point], cpus: Sequence[int]) -> list[Table]:
    """Return what all clients get together, and what one of them waits for."""
    where = f" (CPU {', '.join(map(str, cpus))})" if cpus else ""
    return [
        (
            f"Serving over HTTP, {setting.threads} thread{where}, completions of at most "
            f"{setting.tokens} tokens, {setting.repeats} turns; median (lowest-highest)",
            ("model, temperature", "clients", "off tok/s", "on tok/s", "on / off", "texts differ"),
            [_throughput(point) for point in points],
        ),
        (
            "What a client waits for",
            (
                *("model, temperature", "clients", "off ms/token", "on ms/token", "off / on"),
                "first token, on / off",
            ),
            [_latency(point) for point in points],
        ),
    ]


def _throughput(point: Point) -> list[str]:
    return [
        point.name,
        str(point.clients),
        f"{_speed(point.off):,.0f}",
        f"{_speed(point.on):,.0f}",
        point.throughput_ratio.text(),
        f"{point.differing_share:.1%}",
    ]


def _latency(point: Point) -> list[str]:
    return [
        point.name,
        str(point.clients),
        f"{_token_ms(point.off):.2f}",
        f"{_token_ms(point.on):.2f}",
        point.latency_speedup.text(),
        point.first_token_ratio.text(),
    ]


def as_json(
    setting: Setting, points: Sequence[Point], rivals: Mapping[str, Rival]
) -> dict[str, Any]:
    """Return every figure; ratios are of turns made beside each other."""
    few, many = min(setting.clients), max(setting.clients)
    alone = [point for point in points if point.clients == few]
    crowd = [point for point in points if point.clients == many]
    return {
        "bench": "serve",
        "clients": list(setting.clients),
        "tokens": setting.tokens,
        "repeats": setting.repeats,
        "latency_speedup": {each.name: each.latency_speedup.numbers() for each in alone},
        "first_token_ratio": {each.name: each.first_token_ratio.numbers() for each in alone},
        f"throughput_ratio_{many}": {each.name: each.throughput_ratio.numbers() for each in crowd},
        "peer_ratio": {
            name: None if rival.ratio is None else rival.ratio.numbers()
            for name, rival in rivals.items()
        },
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
