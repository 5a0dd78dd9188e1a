"""Losses of hosts, links, the head and room: the same texts, or one sentence and a resumed run."""

import itertools
import json
import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from end_to_end.workshop import Workshop
from hosts.bed import PLACE, QUICK, Bed, Host, Running, cluster
from hosts.rewards import HOLD
from hosts.test_training import train

pytestmark = pytest.mark.skipif("LONGTAIL_HOSTS" not in os.environ, reason="make test-hosts")
SHARDS = ("--learner.sharding=full", "--cluster.worker_timeout_s=60")
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


def test_shards_over_hosts_resume_with_another_number_and_a_lost_one_ends_the_run(
    workshop: Workshop, hosts: Bed
) -> None:
    """Step 1 is of one worker, step 2 of three shards, the rest of two, one of which is lost.

    The driver's host alone has the files: others are sent the model.
    """
    hold = workshop.path / "hold"
    hold.with_suffix(".reached").unlink(missing_ok=True)
    head, *others = cluster(hosts, 3, **{HOLD: str(hold)})
    head.shell(f"cp -r {workshop.model} {workshop.prompts} {PLACE}")
    own = (f"--model.path={PLACE}/model", f"--data.source={PLACE}/prompts.jsonl", *SHARDS, *HELD)

    def start(steps: int, workers: int) -> Running:
        words = (f"--run.dir={PLACE}/shards", f"--run.steps={steps}", *own)
        return train(workshop, head, "shards", *words, head=head, workers=workers)

    for steps, workers in ((1, 1), (2, 3)):
        run = start(steps, workers)
        assert run.code() == 0, run.said()
    for other in others:
        assert len(list(other.files.glob("home/.cache/longtail/models/*/model.safetensors"))) == 1
    run = start(4, 2)
    run.until(lambda: (head.files / "shards/metrics.jsonl").read_text().count("\n") >= 3)
    hold.touch()
    run.until(hold.with_suffix(".reached").exists)
    next(each for each in others if "ray::Actor" in each.shell("ps ax")).kill()
    hold.unlink()
    assert run.code() == 1, run.said()
    last = run.said().splitlines()[-1]
    assert "a shard of the policy (learner.sharding) is lost" in last, last
    assert "Traceback" not in run.said()
    run = start(4, 1)
    assert run.code() == 0, run.said()
    shutil.copytree(head.files / "shards", workshop.path / "shards")
    assert workshop.texts("shards") == workshop.texts("one")


def test_a_host_that_differs_is_named(workshop: Workshop, hosts: Bed) -> None:
    head, other = hosts.add(), hosts.add(LONGTAIL_NATIVE="0")
    head.head()
    other.join(head)
    run = train(workshop, head, "differs", head=head, workers=2)
    assert run.code() == 1, run.said()
    assert "host 10.77.0.2: native kernels is none, and " in run.said().splitlines()[-1]
