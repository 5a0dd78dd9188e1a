"""Training over hosts: the texts of one process, whatever is lost meanwhile."""

import shutil

from end_to_end.workshop import Workshop
from hosts.bed import PLACE, PORT, Bed, Host, Running, cluster
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


def train(
    workshop: Workshop, host: Host, run: str, *more: str, head: Host, workers: int
) -> Running:
    """Start a run of four steps on a host."""
    own = ("--run.steps=4", f"--cluster.workers={workers}", "--cluster.worker_timeout_s=20")
    words = workshop.words(run, *WORDS, *own, f"--cluster.address={head.address}:{PORT}", *more)
    return host.longtail(*words, log=workshop.path / f"{run}.log")


def test_two_hosts_write_what_one_process_does(workshop: Workshop, hosts: Bed) -> None:
    head, _other = cluster(hosts, 2)
    run = train(workshop, head, "two", head=head, workers=2)
    assert run.code() == 0, run.said()
    assert texts(workshop, "two") == texts(workshop, "one")


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
