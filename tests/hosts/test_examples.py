"""The files of examples/cluster: parsed, and the one for bare hosts run; a run as a job of Ray."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from end_to_end.workshop import Workshop
from hosts.bed import PORT, ROOT, Bed
from hosts.conftest import WORDS

CLUSTER = ROOT / "examples" / "cluster"


@pytest.mark.parametrize("name", ["hosts.sh", "slurm.sbatch"])
def test_a_script_is_bash(name: str) -> None:
    subprocess.run(["bash", "-n", CLUSTER / name], check=True)


def test_the_job_of_kuberay_has_a_processor_for_each_worker() -> None:
    job, policy = yaml.safe_load_all((CLUSTER / "kuberay.yaml").read_text())
    spec = job["spec"]["rayClusterSpec"]
    (group,) = spec["workerGroupSpecs"]
    heads = int(spec["headGroupSpec"]["rayStartParams"]["num-cpus"])
    hosts = group["replicas"] * int(group["rayStartParams"]["num-cpus"])
    words = job["spec"]["entrypoint"].split()
    assert int(words[words.index("--cluster.workers") + 1]) == heads + hosts
    assert policy["kind"] == "NetworkPolicy"


@pytest.mark.skipif("LONGTAIL_HOSTS" not in os.environ, reason="make test-hosts")
def test_the_script_for_bare_hosts_runs_and_leaves_no_ray(
    workshop: Workshop, hosts: Bed, tmp_path: Path
) -> None:
    head, other = hosts.add(), hosts.add()
    config, ssh = tmp_path / "run.toml", tmp_path / "ssh"
    words = (workshop.path / "one" / "config.toml").read_text()
    config.write_text(words.replace(f"{workshop.path}/one", f"{workshop.path}/bare"))
    lines = [f'[ "$1" != {host.address} ] || into={host.space.init}' for host in (head, other)]
    enter = 'nsenter --target=$into --net --mount --pid --wd=/ -- bash -c "$2"'
    ssh.write_text("\n".join(["#!/bin/bash", *lines, enter]))
    ssh.chmod(0o700)
    own = {name: value for name, value in head.env.items() if "RAY_AUTH" not in name}
    own["PATH"] = f"{Path(sys.executable).parent}:{own['PATH']}"
    small = "--num-cpus=1 --object-store-memory=80000000"
    ran = subprocess.run(
        ["bash", CLUSTER / "hosts.sh", config, head.address, other.address],
        env={**own, "SSH": str(ssh), "RAY_OPTIONS": small, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, (ran.stdout, ran.stderr)
    assert workshop.texts("bare") == workshop.texts("one")
    for host in (head, other):
        assert "raylet" not in host.shell("ps ax")
        assert not (host.files / "home/.longtail-token").exists()


_RAY = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
_JOBS = 8265


@pytest.mark.skipif("LONGTAIL_HOSTS" not in os.environ, reason="make test-hosts")
@pytest.mark.parametrize(
    ("processors", "words"), [((1, 1), ()), ((0, 3), ("--entrypoint-num-cpus=1",))]
)
def test_a_job_that_another_host_submits_writes_what_one_process_does(
    workshop: Workshop, hosts: Bed, processors: tuple[int, int], words: tuple[str, ...]
) -> None:
    """The driver is on the head, or where the job has got its processor; worker 0 is beside it."""
    why = "Ray's jobs need pip install 'ray[default]'"
    pytest.importorskip("ray.dashboard.optional_deps", reason=why, exc_type=ImportError)
    more = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    head, other = hosts.add(**more), hosts.add(**more)
    server = ("--include-dashboard=true", f"--dashboard-host={head.address}")
    head.head(*server, f"--num-cpus={processors[0]}")
    other.join(head, f"--num-cpus={processors[1]}")
    name = f"job-{processors[0]}"
    cluster = ("--cluster.workers=2", f"--cluster.address={head.address}:{PORT}")
    train = workshop.words(name, *WORDS, "--run.steps=4", *cluster)
    submit = ("job", "submit", f"--address=http://{head.address}:{_JOBS}", *words, "--")
    longtail = str(Path(sys.executable).parent / "longtail")
    job = other.python(_RAY, *submit, longtail, *train, log=workshop.path / f"{name}.log")
    assert job.code() == 0, job.said()
    assert workshop.texts(name) == workshop.texts("one")
