"""Training over hosts: the texts of one process. test_faults.py has more, for `make test-hosts`."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from end_to_end.workshop import Workshop
from hosts.bed import PATIENCE_S, PLACE, PORT, ROOT, Bed, Host, Running, cluster
from hosts.conftest import WORDS
from longtail.model.hf.weights import read_tensors

_PATHS = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}


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
    first, *_, last = workshop.metrics("two")
    assert first["network/texts_bytes"] > 0
    assert last["network/drafter_bytes"] > 0
    assert last["network/policy_bytes"] == last["network/model_bytes"] == 0, "nothing is published"
    sent = other.files / "home/.cache/longtail/models"
    assert len(list(sent.glob("*/initial/drafter.safetensors"))) == 1
    assert first["network/model_bytes"] > 0
    weights = sum(each.nbytes for each in read_tensors(workshop.policy("two", 4)).values())
    sums = 2 * weights  # of float64, two whole numbers of 8 bytes each
    assert last["network/gradients_bytes"] == 2 * sums, "each of two workers sends 2 (2 - 1) / 2"


def test_a_killed_bed_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import time; from hosts.bed import Bed; bed = Bed();"
        "host = bed.add(); host.shell('sleep 12345 >/dev/null 2>&1 &');"
        "print(host.space.init, flush=True); time.sleep(12345)"
    )
    words = [sys.executable, "-c", script]
    owner = subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ | _PATHS)
    assert owner.stdout is not None
    init = Path("/proc") / owner.stdout.readline().decode().strip()
    assert init.exists()
    owner.kill()
    owner.communicate()
    deadline = time.monotonic() + PATIENCE_S
    while init.exists() or "sleep\x0012345" in _commands():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _commands() -> str:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            found.append(file.read_text())
    return "\n".join(found)
