"""Training over hosts: the texts of one process, whatever is lost meanwhile."""

from end_to_end.workshop import Workshop
from hosts.bed import PORT, Bed, Host, Running, cluster
from hosts.conftest import WORDS


def texts(workshop: Workshop, run: str) -> dict[tuple[int, str], object]:
    """Everything of the rollouts that no rounding can reach."""
    rows = workshop.rollouts(run)
    found = {
        (row["step"], row["request_id"]): (row["text"], row["reward"], row["policy_version"])
        for row in rows
    }
    assert len(found) == len(rows), "nothing is counted twice"
    return found


def train(workshop: Workshop, host: Host, run: str, *more: str, head: Host, workers: int) -> Running:
    """Start a run of four steps on a host."""
    own = ("--run.steps=4", f"--cluster.workers={workers}", "--cluster.worker_timeout_s=20")
    words = workshop.words(run, *WORDS, *own, f"--cluster.address={head.address}:{PORT}", *more)
    return host.longtail(*words, log=workshop.path / f"{run}.log")


def test_two_hosts_write_what_one_process_does(workshop: Workshop, hosts: Bed) -> None:
    head, _other = cluster(hosts, 2)
    run = train(workshop, head, "two", head=head, workers=2)
    assert run.code() == 0, run.said()
    assert texts(workshop, "two") == texts(workshop, "one")
