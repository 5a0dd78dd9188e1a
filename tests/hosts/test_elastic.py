"""Hosts that join a run and leave it: the texts of one process."""

import os
import re

import pytest

from end_to_end.workshop import Workshop
from hosts.bed import Bed, cluster
from hosts.conftest import WORDS
from hosts.test_training import train

pytestmark = pytest.mark.skipif("LONGTAIL_HOSTS" not in os.environ, reason="make test-hosts")
MANY = "--run.steps=100000"


def test_a_host_that_joins_in_mid_run_takes_part_until_it_is_lost(
    workshop: Workshop, hosts: Bed
) -> None:
    (head,) = cluster(hosts, 1)
    run = train(workshop, head, "elastic", MANY, "--cluster.min_workers=1", head=head, workers=2)
    rows = workshop.path / "elastic" / "metrics.jsonl"
    run.until(lambda: rows.exists() and rows.read_text() != "")
    assert "1 of 2 workers take part from now on" in run.said()
    other = hosts.add()
    other.join(head)
    run.until(lambda: "2 of 2 workers take part from now on" in run.said())
    joined = rows.read_text().count("\n")
    run.until(lambda: rows.read_text().count("\n") > joined + 2)
    other.kill()
    run.until(lambda: run.said().count("1 of 2 workers take part from now on") == 2)
    head.shell("pkill -INT -f '[l]ongtail.cli.main'")
    assert run.code() == 130, run.said()
    stopped = re.search(r"stopped after step (\d+)", run.said())
    assert stopped is not None, run.said()
    steps = int(stopped[1])
    assert workshop.train("alone", *WORDS, f"--run.steps={steps}").code == 0
    found = workshop.texts("elastic").items()
    assert {name: text for name, text in found if name[0] <= steps} == workshop.texts("alone")
    events = (workshop.path / "elastic" / "trace.json").read_text()
    assert '"name": "absent"' in events
    assert len(set(re.findall(r'"name": "generating"[^\n]*"tid": (\d)', events))) == 2
