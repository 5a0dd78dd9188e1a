"""Losses of hosts, links, the head and room: the same texts, or one sentence and a resumed run."""

import itertools
import os
import shutil
import time

import pytest

from end_to_end.workshop import Workshop
from hosts.bed import PLACE, Bed, Host, Running, cluster
from hosts.rewards import HOLD
from hosts.test_training import texts, train
from longtail.cluster.timeline import event_of

pytestmark = pytest.mark.skipif("LONGTAIL_HOSTS" not in os.environ, reason="make test-hosts")
HELD = ("--reward.name=hosts.rewards:held", "--reward.timeout_s=200")


def begin(workshop: Workshop, hosts: Bed, run: str, *more: str, num: int) -> tuple[Running, Host]:
    """Start a run of two workers, driven by the head; return it in step 2, and its other host.

    All workers are idle until the file `hold` is removed.
    """
    hold = workshop.path / "hold"
    hold.unlink(missing_ok=True)
    hold.with_suffix(".reached").unlink(missing_ok=True)
    head, *others = cluster(hosts, num, **{HOLD: str(hold)})
    running = train(workshop, head, run, *HELD, *more, head=head, workers=2)
    running.until(lambda: _steps(workshop, run) >= 1)
    hold.touch()
    running.until(hold.with_suffix(".reached").exists)
    return running, next(host for host in others if "ray::_Actor" in host.shell("ps ax"))


def _steps(workshop: Workshop, run: str) -> int:
    file = workshop.path / run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def _lost_while(workshop: Workshop, run: str) -> list[str]:
    """Return the states in which workers were lost."""
    lines = (workshop.path / run / "trace.json").read_bytes().splitlines(keepends=True)
    spans = [each for line in lines[1:] if (each := event_of(line))["ph"] == "X"]
    worker = [each["name"] for each in spans if each["tid"] == 1]
    return [before for before, now in itertools.pairwise(worker) if now == "dead"]


def _in_state(state: str, workshop: Workshop, run: Running, name: str, host: Host) -> None:
    """Return when the workers are in the state."""
    hold = workshop.path / "hold"
    if state == "idle":
        return
    host.limit("100kbit")  # the gradients take seconds
    hold.unlink()
    if state == "learning":
        time.sleep(1.5)
        return
    run.until(lambda: _steps(workshop, name) >= 2)


@pytest.mark.parametrize("state", ["generating", "learning", "idle"])
def test_a_host_is_lost_in_each_state_and_another_goes_on(
    workshop: Workshop, hosts: Bed, state: str
) -> None:
    run, host = begin(workshop, hosts, state, num=3)
    _in_state(state, workshop, run, state, host)
    host.kill()
    (workshop.path / "hold").unlink(missing_ok=True)
    assert run.code() == 0, run.said()
    assert run.said().count("it is replaced") >= 1
    assert texts(workshop, state) == texts(workshop, "one")
    print(state, _lost_while(workshop, state))


def test_a_link_is_cut_for_seconds_and_nothing_is_lost(workshop: Workshop, hosts: Bed) -> None:
    run, host = begin(workshop, hosts, "cut", num=2)
    host.cut()
    (workshop.path / "hold").unlink()
    time.sleep(2.0)
    host.mend()
    assert run.code() == 0, run.said()
    assert "it is replaced" not in run.said()
    assert texts(workshop, "cut") == texts(workshop, "one")


def test_the_head_is_lost_and_the_run_resumes_on_another(workshop: Workshop, hosts: Bed) -> None:
    hold = workshop.path / "hold"
    head, driver = cluster(hosts, 2, **{HOLD: str(hold)})
    run = train(workshop, driver, "head", *HELD, head=head, workers=2)
    run.until(lambda: _steps(workshop, "head") >= 1)
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
    assert texts(workshop, "head") == texts(workshop, "one")


@pytest.mark.parametrize("where", ["cache", "run"])
def test_a_full_disk_ends_the_run_with_one_sentence(
    workshop: Workshop, hosts: Bed, where: str
) -> None:
    head, other = cluster(hosts, 2)
    head.shell(f"cp -r {workshop.model} {workshop.prompts} {PLACE}")
    own = (f"--model.path={PLACE}/model", f"--data.source={PLACE}/prompts.jsonl")
    words = (*own, f"--run.dir={PLACE}/full", "--run.steps=100000")
    fill = f"cat /dev/zero >{PLACE}/filled || true"
    if where == "cache":
        other.shell(fill)
    run = train(workshop, head, "full", *words, head=head, workers=2)
    if where == "run":
        run.until(lambda: (head.files / "full/checkpoints/step_000002").exists())
        head.shell(fill)
    assert run.code() == 1, run.said()
    assert "Traceback" not in run.said()
    assert "No space left" in run.said().splitlines()[-1], run.said()
    for host in (head, other):
        host.shell(f"rm -f {PLACE}/filled")
    run = train(workshop, head, "full", *own, f"--run.dir={PLACE}/full", head=head, workers=2)
    assert run.code() == 0, run.said()


def test_a_host_is_lost_for_good_and_the_run_resumes_with_fewer_workers(
    workshop: Workshop, hosts: Bed
) -> None:
    run, host = begin(workshop, hosts, "fewer", num=2)
    host.kill()
    (workshop.path / "hold").unlink()
    assert run.code() == 1, run.said()
    last = run.said().splitlines()[-1]
    assert last.startswith("longtail: a host is gone, and for 20 s no other has had room"), last
    assert "Traceback" not in run.said()
    head = hosts.hosts[0]
    run = train(workshop, head, "fewer", *HELD, head=head, workers=1)
    assert run.code() == 0, run.said()
    assert texts(workshop, "fewer") == texts(workshop, "one")


def test_hosts_without_files_are_sent_the_model_and_a_run_resumes_on_other_hosts(
    workshop: Workshop, hosts: Bed
) -> None:
    """The driver is no head; step 1 is of one host, steps 2 and 3 of two, step 4 of one."""
    head, driver = cluster(hosts, 2)
    driver.shell(f"cp -r {workshop.model} {workshop.prompts} {PLACE}")
    own = (f"--model.path={PLACE}/model", f"--data.source={PLACE}/prompts.jsonl")
    for steps, workers in ((1, 1), (3, 2), (4, 1)):
        words = (f"--run.dir={PLACE}/apart", f"--run.steps={steps}", *own)
        run = train(workshop, driver, "apart", *words, head=head, workers=workers)
        assert run.code() == 0, run.said()
    assert len(list(head.files.glob("home/.cache/longtail/models/*/model.safetensors"))) == 1
    assert not (head.files / "model").exists()
    shutil.copytree(driver.files / "apart", workshop.path / "apart")
    assert texts(workshop, "apart") == texts(workshop, "one")
