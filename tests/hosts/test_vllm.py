"""Training over hosts with vLLM: the texts of longtail's engine in one process."""

from pathlib import Path

from hosts.bed import PLACE, PORT, bed
from support import toy
from vllm_wheel.runs import NEEDS_VLLM, OPTIONS, PYTHON, read, read_metrics, same, written

pytestmark = NEEDS_VLLM
STEPS = "--run.steps=3"
_ENV = {
    "RAY_worker_niceness": "0",
    "VLLM_CACHE_ROOT": str(Path.home() / ".cache" / "vllm"),  # else each host looks at its models
}


def test_two_hosts_write_what_one_process_does_and_vllm_listens_on_loopback(tmp_path: Path) -> None:
    """Only Ray's port is on all networks, and only learners' are on the hosts' network."""
    path = tmp_path / "two"
    words = (*toy.WORDS, *OPTIONS, STEPS, "--rollout.engine=vllm", "--speculation.drafter=fresh")
    with bed(PYTHON) as made:
        hosts = [made.add(**_ENV) for _ in range(2)]
        for host in hosts:  # as its name is known on a network
            host.shell(f"echo {host.address} $(hostname) > {PLACE}/names")
            host.shell(f"mount --bind {PLACE}/names /etc/hosts")
        head, other = hosts
        head.head()
        other.join(head)
        own = (f"--run.dir={path}", f"--cluster.address={head.address}:{PORT}")
        run = head.longtail("train", *words, *own, "--cluster.workers=2", log=tmp_path / "log")
        run.until(lambda: (path / "metrics.jsonl").exists() and read_metrics(path) != [])
        for host, num_learners in ((head, 2), (other, 1)):  # worker 0 has the learners' store
            lines = [line for line in host.shell("ss -ltnpH").splitlines() if "ray::A" in line]
            listens = [line.split()[3].rpartition(":")[0] for line in lines]
            assert set(listens) == {"*", host.address, "127.0.0.1"}, lines
            assert (listens.count("*"), listens.count(host.address)) == (1, num_learners), lines
        assert run.code() == 0, run.said()
    expected = ("--rollout.engine=own", "--speculation.drafter=none", STEPS)
    assert same(read(path), written(tmp_path / "own", *expected))
