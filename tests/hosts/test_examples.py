"""The files of examples/cluster: parsed, and the one for bare hosts run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from end_to_end.workshop import Workshop
from hosts.bed import ROOT, Bed

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
