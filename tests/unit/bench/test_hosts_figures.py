"""Figures of runs over hosts: what they compute from counters and from a trace."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from hosts.figures import cpu_s, link_bytes, recoveries


def test_counters_are_read_from_the_kernels_tables() -> None:
    table = (
        "Inter-|   Receive                                |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop\n"
        "    lo:  77   1 0 0 0 0 0 0   77   1 0 0 0 0 0 0\n"
        "  eth0:1234  12 0 0 0 0 0 0 5678  34 0 0 0 0 0 0\n"
    )
    assert link_bytes(table) == (1234, 5678)
    before = sum(os.times()[:2])
    found = cpu_s(Path("/proc/self/stat").read_text())
    assert before <= found + 0.02
    assert found <= sum(os.times()[:2]) + 0.02
    stat = "7 (ray::a) b) S 1 1 1 0 -1 0 0 0 0 0 " + "300 200 9 9 0"
    assert cpu_s(stat) == 500 / os.sysconf("SC_CLK_TCK")


def test_a_recovery_is_from_a_loss_to_the_next_shard_of_any_worker() -> None:
    events = [
        *spans(0, generating=9.0, idle=1.0, learning=2.0),
        *spans(1, generating=3.0, dead=0.5, starting=4.0, generating_=4.5),
        *spans(1, at=20.0, generating=1.0, dead=0.5, starting=9.0),
        *spans(0, at=20.0, generating=3.0, idle=0.5, generating_=3.0),
        *spans(1, at=40.0, learning=1.0, dead=0.5, starting=1.0),
    ]
    assert recoveries(events) == [(4.5, True), (2.5, False)]


def spans(worker: int, *, at: float = 0.0, **seconds: float) -> Iterator[dict[str, Any]]:
    for name, each in seconds.items():
        yield {
            "ph": "X",
            "name": name.rstrip("_"),
            "ts": 1e6 * at,
            "dur": 1e6 * each,
            "tid": worker,
        }
        at += each
