"""A Ray of our own, and the check of an address; end_to_end/test_cluster.py runs Ray itself."""

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from longtail.cluster.workers.ray import own_ray, watch_ray
from longtail.cluster.workers.ray.own_ray import OwnRay
from longtail.cluster.workers.ray.watch_ray import check_answers


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the parent of the folders, in place of /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(own_ray, "_LONGEST_PLACE", 1000)
    monkeypatch.setattr(own_ray.ray, "init", lambda **options: None)
    monkeypatch.setattr(own_ray.ray, "shutdown", lambda: None)
    return tmp_path


def _own_a_ray(folder: Path, pipe: Any) -> None:
    tempfile.tempdir, own_ray._LONGEST_PLACE = str(folder), 1000
    own_ray.ray.init = lambda **_: None
    ray = OwnRay(1)
    (ray.folder / "ray").mkdir()
    with (ray.folder / "ray" / "log").open("w") as log:
        writer = subprocess.Popen(["sleep", "1000"], stdout=log)
    pipe.send((str(ray.folder), writer.pid, ray._reaper.pid))
    pipe.recv()


_WATCHED = """
import subprocess, sys, time
from types import SimpleNamespace
from longtail.cluster.workers.ray import watch_ray
raylet = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
processes = {"raylet": [SimpleNamespace(process=raylet)]}
watch_ray.ray_worker._global_node = SimpleNamespace(all_processes=processes)
watch_ray._HEAD_S, watch_ray._POLL_MS = 1.0, 100
watch_ray.end_with_ray(lambda: print("said"), sys.argv[1])
print(raylet.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes have no descriptors")
@pytest.mark.parametrize(("head", "what"), [("", "raylet"), ("127.0.0.1:1", "head at 127.0.0.1:1")])
def test_a_run_ends_with_a_sentence_when_its_raylet_ends(head, what):
    """Or when the head of its cluster is silent."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _WATCHED, head], text=True, **pipes) as run:
        raylet = int(run.stdout.readline())
        if not head:
            os.kill(raylet, signal.SIGKILL)
        out, err = run.communicate(timeout=60)
        with contextlib.suppress(ProcessLookupError):
            os.kill(raylet, signal.SIGKILL)
    assert (run.returncode, out) == (1, "said\n")
    assert f"Ray's {what}" in err
    assert err.endswith("start again: the run resumes from its newest checkpoint\n")


def test_the_raylet_of_a_cluster_is_found_by_its_socket(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "raylet"))
        server.listen()
        assert watch_ray._server_of(str(tmp_path / "raylet")) == os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_a_reaper_says_the_last_word_unless_it_was_said(place):
    for said, words in ((False, 1), (True, 0)):
        (place / f"{said}").mkdir()
        command = [sys.executable, "-I", "-S", own_ray._REAPER, place / f"{said}"]
        done = subprocess.run(command, input=b"." * said, capture_output=True, check=True)
        assert done.stderr.count(b"start again: the run resumes") == words
        assert not (place / f"{said}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_the_processes_of_a_ray_end_when_its_owner_is_killed(place):
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


def test_the_token_is_random_and_private_and_the_environment_is_restored(place, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the-users-own")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    tokens = set()
    for _ in range(2):
        ray = OwnRay(2)
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert (token.parent, ray.folder.parent) == (ray.folder, place)
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
    assert {len(token) for token in tokens} == {64}
    assert len(tokens) == 2


def test_the_lines_that_workers_print_are_read_once_without_rays_own():
    ray = OwnRay(1)
    log = ray.folder / "ray" / "session_2026-01-01" / "logs" / "worker-ab-01-77.err"
    log.parent.mkdir(parents=True)
    log.write_text(":job_id:01000000\n:actor_name:Actor\nteaching the drafter, once\nhalf a")
    assert list(ray.read_new_lines()) == ["teaching the drafter, once"]
    with log.open("a") as file:
        file.write(" line\n[2026-11-22 14:05:52,454 W 14525 14525] gcs_client.cc:210: oh\nmore\n")
    assert list(ray.read_new_lines()) == ["half a line", "more"]
    assert list(ray.read_new_lines()) == []
    ray.close()


@pytest.fixture
def server() -> Iterator[Callable[[bytes], str]]:
    """Return the address of a server that answers these bytes; empty: it is silent."""
    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as sock:

        def answer(words: bytes) -> None:
            with sock.accept()[0] as connection:
                assert connection.recv(100).startswith(b"PRI * HTTP/2.0")
                connection.sendall(words)

        def begin(words: bytes) -> str:
            if words:
                pool.submit(answer, words)
            return f"127.0.0.1:{sock.getsockname()[1]}"

        yield begin


def test_a_server_that_speaks_grpc_and_names_without_a_port_are_left_to_ray(server):
    check_answers(server(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))))
    for address in ("", "auto", "local", "here"):
        check_answers(address)


@pytest.mark.parametrize(
    ("words", "reason"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "another program than Ray"), (b"", "timed out")],
)
def test_another_server_and_an_impossible_port_are_refused(server, words, reason):
    with pytest.raises(ConnectionError, match=reason):
        check_answers(server(words), timeout_s=0.2)
    with pytest.raises(ConnectionError, match="no Ray answers there"):
        check_answers("ray://127.0.0.1:99999999999")
