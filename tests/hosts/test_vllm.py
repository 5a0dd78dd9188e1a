"""Training over hosts with vLLM: the texts of longtail's engine in one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hosts.bed import PORT, Bed, bed, cluster
from support import toy
from vllm_wheel.runs import NEEDS_VLLM, OPTIONS, PYTHON, read, read_metrics, same, written

pytestmark = NEEDS_VLLM


@pytest.fixture
def hosts() -> Iterator[Bed]:
    """An empty bed in the environment with vLLM."""
    with bed(PYTHON) as made:
        yield made


def test_two_hosts_write_what_one_process_does_and_open_no_port(
    hosts: Bed, tmp_path: Path
) -> None:
    """A worker's ports are those of a run with longtail's engine."""
    head, other = cluster(hosts, 2)
    path, own = tmp_path / "two", tmp_path / "own"
    words = (*toy.WORDS, *OPTIONS, "--speculation.drafter=fresh", "--rollout.engine=vllm",
             "--run.steps=4", "--run.device=cpu", "--cluster.workers=2", f"--run.dir={path}")  # fmt: skip
    run = head.longtail("train", *words, f"--cluster.address={head.address}:{PORT}", log=tmp_path / "log")
    run.until(lambda: (path / "metrics.jsonl").exists() and read_metrics(path) != [])
    for host in (head, other):
        lines = [line for line in host.shell("ss -ltnpH").splitlines() if "ray::_Actor" in line]
        listens = [line.split()[3].rpartition(":")[0] for line in lines]
        print(lines)
        assert listens.count("*") == 1, lines
        assert set(listens) == {"*", host.address}, lines
    assert run.code() == 0, run.said()
    expected = written(own, "--rollout.engine=own", "--speculation.drafter=none")
    assert same(read(path), expected)
    assert read_metrics(path)[-1]["network/drafter_bytes"] > 0
