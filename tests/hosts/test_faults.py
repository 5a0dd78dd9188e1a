"""Losses of hosts, links, the head and room: the same texts, or one sentence and a resumed run."""

import itertools
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from end_to_end.workshop import Workshop
from hosts.bed import QUICK, Bed, Host, Running, cluster
from hosts.rewards import HOLD
from hosts.test_training import train

pytestmark = pytest.mark.skipif("LONGTAIL_HOSTS" not in os.environ, reason="make test-hosts")
HELD = ("--reward.name=hosts.rewards:held", "--reward.timeout_s=200")


class Begun(NamedTuple):
    """A run, the host of its worker 1, and the file that holds it back."""

    run: Running
    host: Host
    hold: Path


def begin(
    workshop: Workshop, hosts: Bed, run: str, *words: str, steps: int, num: int, **env: str | None
) -> Begun:
    """Start a run of two workers, driven by the head; return it when `steps` are done.

    All workers are idle until the file `hold` is removed; before the first step, one evaluates.
    """
    hold = workshop.path / "hold"
    hold.with_suffix(".reached").unlink(missing_ok=True)
    if not steps:
        hold.touch()
    head, *others = cluster(hosts, num, **{HOLD: str(hold)}, **env)
    running = train(workshop, head, run, *HELD, *words, head=head, workers=2)
    running.until(lambda: steps_done(workshop, run) >= steps)
    hold.touch()
    running.until(hold.with_suffix(".reached").exists)
    return Begun(running, next(host for host in others if host.has_worker), hold)


def steps_done(workshop: Workshop, run: str) -> int:
    """Return the number of steps in the metrics of a run."""
    file = workshop.path / run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def _lost_while(workshop: Workshop, run: str) -> list[str]:
    """Return the states in which workers were lost."""
    trace = (workshop.path / run / "trace.json").read_text().removesuffix(",\n")
    spans = [each for each in json.loads(f"{trace}]") if each["ph"] == "X"]
    worker = [each["name"] for each in spans if each["tid"] == 1]
    return [before for before, now in itertools.pairwise(worker) if now == "dead"]


@pytest.mark.parametrize("state", ["generating", "learning", "idle"])
def test_a_host_is_lost_in_each_state_and_another_goes_on(
    workshop: Workshop, hosts: Bed, state: str
) -> None:
    run, host, hold = begin(workshop, hosts, state, steps=int(state != "generating"), num=3)
    if state != "idle":
        host.limit("100kbit")  # its texts or its gradients take seconds
        hold.unlink()
        time.sleep(1.5)
    host.kill()
    hold.unlink(missing_ok=True)
    assert run.code() == 0, run.said()
    assert workshop.texts(state) == workshop.texts("one")
    assert _lost_while(workshop, state)[0] == {"idle": "learning"}.get(state, state)


@pytest.mark.parametrize("seconds", [2, 30, None])
def test_a_link_is_cut_and_nothing_is_lost(
    workshop: Workshop, hosts: Bed, seconds: int | None
) -> None:
    """For 30 s with the patience that Ray and longtail have by default, and for ever."""
    name, num, words, health = f"cut-{seconds}", 2, (), {}
    if seconds != 2:
        num, words, health = 3, ("--cluster.worker_timeout_s=180",), dict.fromkeys(QUICK)
    run, host, hold = begin(workshop, hosts, name, *words, steps=1, num=num, **health)
    host.cut()
    hold.unlink()
    if seconds:
        time.sleep(seconds)
        host.mend()
    assert run.code() == 0, run.said()
    assert seconds == 30 or ("it is replaced" in run.said()) == (seconds is None)
    assert workshop.texts(name) == workshop.texts("one")


def test_the_head_is_lost_and_the_run_resumes_on_another(workshop: Workshop, hosts: Bed) -> None:
    hold = workshop.path / "hold"
    head, driver = cluster(hosts, 2, **{HOLD: str(hold)})
    run = train(workshop, driver, "head", *HELD, head=head, workers=2)
    run.until(lambda: steps_done(workshop, "head") >= 1)
    hold.touch()
    run.until(hold.with_suffix(".reached").exists)
    head.kill()
    hold.unlink()
    assert run.code() == 1, run.said()
    last = run.said().splitlines()[-1]
    assert last.startswith("longtail: Ray's head at 10.77.0.1:6379 has not answered for 45 s"), last
    assert "Traceback" not in run.said()
    new, other = cluster(hosts, 2, **{HOLD: str(hold)})
    run = train(workshop, other, "head", *HELD, head=new, workers=2)
    assert run.code() == 0, run.said()
    assert workshop.texts("head") == workshop.texts("one")
