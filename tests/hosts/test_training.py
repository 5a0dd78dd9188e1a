"""Training over hosts: the texts of one process. test_faults.py has more, for `make test-hosts`."""

import shutil

from end_to_end.workshop import Workshop
from hosts.bed import PLACE, PORT, Bed, Host, Running, cluster
from hosts.conftest import WORDS


def train(
    workshop: Workshop, host: Host, run: str, *more: str, head: Host, workers: int
) -> Running:
    """Start a run of four steps on a host."""
    own = ("--run.steps=4", f"--cluster.workers={workers}", "--cluster.worker_timeout_s=20")
    words = workshop.words(run, *WORDS, *own, f"--cluster.address={head.address}:{PORT}", *more)
    return host.longtail(*words, log=workshop.path / f"{run}.log")


def test_two_hosts_write_what_one_process_does_and_listen_on_their_network(
    workshop: Workshop, hosts: Bed
) -> None:
    """Each process of Ray has a port on all networks; longtail's are on the hosts' alone.

    Only the driver's host has the drafter: that of an earlier run.
    """
    head, other = cluster(hosts, 2)
    shutil.copytree(workshop.path / "one" / "drafter", head.files / "drafter")
    words = (f"--speculation.drafter={PLACE}/drafter+history",)
    run = train(workshop, head, "two", *words, head=head, workers=2)
    rows = workshop.path / "two" / "metrics.jsonl"
    run.until(lambda: rows.exists() and rows.read_text() != "")
    for host in (head, other):
        lines = [line for line in host.shell("ss -ltnpH").splitlines() if "ray::Actor" in line]
        listens = [line.split()[3].rpartition(":")[0] for line in lines]
        assert listens.count("*") == 1, lines
        assert set(listens) == {"*", host.address}, lines
    assert run.code() == 0, run.said()
    assert workshop.texts("two") == workshop.texts("one")
    sent = other.files / "home/.cache/longtail/models"
    assert len(list(sent.glob("*/initial/drafter.safetensors"))) == 1
