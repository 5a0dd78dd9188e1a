"""A host that gets half of its processor: the texts of one process, and fewer of them there."""

import os

import pytest

from end_to_end.workshop import Workshop, read_lines
from hosts.bed import Bed, cluster
from hosts.conftest import WORDS
from hosts.test_training import train

pytestmark = pytest.mark.skipif("LONGTAIL_HOSTS" not in os.environ, reason="make test-hosts")
LONG = (
    "--run.steps=6",
    "--rollout.max_tokens=384",
    "--rollout.group_size=8",
    "--data.heldout_size=1",
)
"""Words of rollouts that take seconds: speeds are measured in them."""
_HALF = """
import os, signal, time
from pathlib import Path
found = []
while not found:
    time.sleep(0.2)
    each = [(path.parent.name, path.read_bytes()) for path in Path("/proc").glob("[0-9]*/cmdline")]
    found = [int(number) for number, words in each if words.startswith(b"ray::Actor")]
while True:
    for sent in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(found[0], sent)
        time.sleep(0.02)
"""


def test_a_slow_host_writes_fewer_texts_from_the_step_on_in_which_it_is_measured(
    workshop: Workshop, hosts: Bed
) -> None:
    assert workshop.train("whole", *WORDS, *LONG).code == 0
    head, other = cluster(hosts, 2)
    brake = other.python(_HALF, log=workshop.path / "brake.log")
    run = train(workshop, head, "slow", *LONG, head=head, workers=2)
    assert run.code() == 0, run.said() + brake.said()
    brake.process.kill()
    assert workshop.texts("slow") == workshop.texts("whole")
    assert workshop.metrics("slow")[-1]["cluster/slowest_speed"] < 1.0
    tokens = [0, 0]
    for each in read_lines(workshop.path / "slow" / "speculation.jsonl"):
        if each["step"] > 3 and each["kind"] == "training":
            tokens[each["worker"]] += sum(each["running"]) + sum(each["accepted"])
    assert tokens[1] < 0.8 * tokens[0], tokens
