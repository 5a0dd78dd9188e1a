"""The files of a Ray of our own; Ray itself runs in end_to_end/test_open_ports.py."""

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from longtail.cluster.ray import instance as own_ray
from longtail.cluster.ray.instance import OwnRay


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the parent of the folders, in place of /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(own_ray, "_LONGEST_PLACE", 1000)
    return tmp_path


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the options of each start of Ray, which is not started."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(own_ray.ray, "init", lambda **options: calls.append(options))
    monkeypatch.setattr(own_ray.ray, "shutdown", lambda: None)
    return calls


def _hold(folder: Path, pipe: Any) -> None:
    folder.mkdir()
    own_ray._locked(folder / "lock")
    pipe.send("held")
    pipe.recv()


def _own_a_ray(folder: Path, pipe: Any) -> None:
    tempfile.tempdir, own_ray._LONGEST_PLACE = str(folder), 1000
    own_ray.ray.init = lambda **_: None
    ray = OwnRay(1)
    (ray.folder / "ray").mkdir()
    with (ray.folder / "ray" / "log").open("w") as log:
        writer = subprocess.Popen(["sleep", "1000"], stdout=log)
    pipe.send((str(ray.folder), writer.pid, ray._reaper.pid))
    pipe.recv()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_the_processes_of_a_ray_end_when_its_owner_is_killed(place: Path):
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    owner = context.Process(target=_own_a_ray, args=(place, far))
    owner.start()
    folder, *pids = near.recv()
    with contextlib.ExitStack() as stack:
        read = stack.enter_context(Path(folder, "ray", "log").open())
        stranger = stack.enter_context(subprocess.Popen(["sleep", "1000"], stdin=read))
        stack.callback(stranger.kill)
        ends = [os.pidfd_open(pid) for pid in pids]
        owner.kill()
        for end in ends:
            assert select.select([end], [], [], 60)[0], "the process ends"
            os.close(end)
        assert stranger.poll() is None
    assert not Path(folder).exists()
    owner.join()


def test_folders_of_killed_runs_are_removed_and_those_in_use_are_not(place: Path):
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    holder = context.Process(target=_hold, args=(place / "longtail-ray-used", far))
    holder.start()
    assert near.recv() == "held"
    (place / "longtail-ray-left" / "ray").mkdir(parents=True)
    (place / "elsewhere").mkdir()
    (place / "longtail-ray-link").symlink_to(place / "elsewhere")
    own_ray._sweep()
    assert {each.name for each in place.iterdir()} == {
        *("longtail-ray-used", "longtail-ray-link", "elsewhere")
    }
    holder.kill()
    holder.join()
    own_ray._sweep()
    assert not (place / "longtail-ray-used").exists()


def test_the_token_is_random_and_private_and_the_environment_is_restored(
    place: Path, begun: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the-users-own")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    tokens = set()
    for _ in range(2):
        ray = OwnRay(2)
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert token.parent == ray.folder
        assert ray.folder.parent == place
        assert ray.folder.stat().st_mode & 0o777 == 0o700
        assert token.stat().st_mode & 0o777 == 0o600
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert "RAY_AUTH_TOKEN" not in os.environ, "it would go before the file"
        tokens.add(token.read_text())
        ray.close()
        assert not list(place.iterdir())
        assert os.environ["RAY_AUTH_TOKEN"] == "the-users-own"
        assert os.environ["RAY_AUTH_MODE"] == "disabled"
        assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    assert len(tokens) == 2
    assert all(len(token) == 64 for token in tokens)
    assert begun[0]["include_dashboard"] is False
    assert "_node_ip_address" not in begun[0], "Ray replaces loopback in it"


def test_a_long_path_for_temporary_files_is_not_used(
    place: Path, begun: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.undo()
    monkeypatch.setattr(own_ray.ray, "init", lambda **options: None)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    ray = OwnRay(1)
    name = f"{ray.folder}/ray/session_2026-11-22_14-05-38_115447_4194304/sockets/plasma_store.12"
    ray.close()
    assert len(name) <= 107 < len(f"{place}/longtail-ray-12345678/{name[-75:]}")


def test_a_ray_that_does_not_start_leaves_no_files(place: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(**options: Any) -> None:
        raise RuntimeError("Failed to start GCS")

    monkeypatch.setattr(own_ray.ray, "init", fail)
    with pytest.raises(RuntimeError, match="GCS"):
        OwnRay(2)
    assert not list(place.iterdir())
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


def _be_stopped_as_ray_is() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: exit(number))
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_while_ray_starts_is_a_keyboard_interrupt():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), own_ray.quietly():
        _be_stopped_as_ray_is()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_lines_that_workers_print_are_read_once_without_rays_own(
    begun: list[dict[str, Any]],
):
    ray = OwnRay(1)
    log = ray.folder / "ray" / "session_2026-01-01" / "logs" / "worker-ab-01-77.err"
    log.parent.mkdir(parents=True)
    log.write_text(":job_id:01000000\n:actor_name:_Actor\nteaching the drafter, once\nhalf a")
    assert list(ray.read_new_lines()) == ["teaching the drafter, once"]
    with log.open("a") as file:
        file.write(" line\n[2026-11-22 14:05:52,454 W 14525 14525] gcs_client.cc:210: oh\nmore\n")
    assert list(ray.read_new_lines()) == ["half a line", "more"]
    assert list(ray.read_new_lines()) == []
    ray.close()


def test_every_meeting_point_is_new(begun: list[dict[str, Any]]):
    ray = OwnRay(1)
    places = {ray.meeting_point() for _ in range(3)}
    assert len(places) == 3
    assert all(each.startswith(f"file://{ray.folder}/") for each in places)
    ray.close()


@pytest.mark.slow
def test_a_server_that_greets_as_ray_and_is_silent_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionError, match="no word of Ray's came for 1 s"):
            own_ray.check_is_ray(address, 1.0)
