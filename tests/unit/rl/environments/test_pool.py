"""Environments' processes: each bad one is contained alone, and leaves nothing behind."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from longtail.config.rewards import EnvironmentSection
from longtail.errors import ConfigError
from longtail.rl.environments.pool import open_environments
from longtail.rl.environments.session import Reply
from longtail.rl.processes import pool
from longtail.rl.processes.pool import ProcessPool, confinement
from support.run_processes import wait_until

TOY = '''
import json, os, signal, socket, subprocess, sys, tempfile, time

print("printed at import")

class Toy:
    """Does what the text says."""

    def reset(self, seed, start="begin"):
        return json.dumps([start, seed, os.listdir("."), os.environ["OMP_NUM_THREADS"]])

    def step(self, text):
        match text.split()[0]:
            case "raise": raise ValueError("no way")
            case "exit": sys.exit(3)
            case "die": os._exit(3)
            case "killed": os.kill(os.getpid(), signal.SIGKILL)
            case "hang": time.sleep(3600)
            case "stop": os.kill(os.getpid(), signal.SIGSTOP)
            case "memory": bytes(1 << 45)
            case "write":
                with open("large", "wb") as file:
                    file.truncate(1 << 30)
                    file.seek(1 << 30)
                    file.write(b"x")
            case "long": return "x" * (1 << 27), 1, False
            case "fork" | "bear":
                for _ in range(3):
                    if os.fork() == 0:
                        os.setsid()
                        subprocess.Popen(["sleep", text.split()[1]], start_new_session=True)
                        time.sleep(3600)
                while text.startswith("fork"): time.sleep(1)
            case "forge":
                for fd in range(3, 256):
                    try: os.write(fd, text[6:].replace("$", "\\n").encode())
                    except OSError: pass
                while "$" not in text: time.sleep(1)
            case "where": text = f"{os.getcwd()} {os.path.basename(tempfile.gettempdir())}"
            case "open": open(text.split()[1] + "/found", "w").close()
            case "connect": socket.create_connection(("127.0.0.1", int(text.split()[1])))
            case "surrogate": return "half \\ud83d a pair", 1, False
            case "file": open("left", "w").close()
            case "infinite": return "", float("inf"), False
            case "last": return None, 1, True
        return [{"role": "user", "content": text}], 0.5, False
'''


def opened(name: str = "toy_environments:Toy", *, most: int = 3, **own: float) -> ProcessPool:
    return open_environments(EnvironmentSection(name=name, **own), "hermes", most=most)


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    folder = tmp_path_factory.mktemp("toys")
    (folder / "toy_environments.py").write_text(TOY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # where environments are found
        with opened(timeout_s=3.0) as toys:
            yield toys


def play(toys: ProcessPool, *texts: str) -> dict[str, Reply | str]:
    """Return the answer of an episode of its own to each text."""
    left, found = [*texts], dict[str, Reply | str]()
    while len(found) < len(texts):
        while left and toys.num_free:
            text = left.pop()
            toys.begin(text, "reset", {}, 7)
        for key, answer in toys.answers(60.0):
            if isinstance(answer, Reply) and not answer.reward:  # of reset
                toys.ask(key, "step", key)
            else:
                found[key] = answer
                toys.end(key)
    return found


def answer(toys: ProcessPool, key: str) -> Reply:
    ((found, reply),) = toys.answers(60.0)
    assert found == key
    assert isinstance(reply, Reply)
    return reply


def processes(mark: str) -> list[str]:
    """Return the processes with a text in their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [file.parent.name] * (mark.encode() in file.read_bytes())
        except OSError:
            continue
    return found


KILLED = "environment.name = 'toy_environments:Toy': it gave no answer in 3 s and was killed"
BAD = {
    "raise": "ValueError: no way (toy_environments.py:14, in step)",
    "exit": "SystemExit: 3 (toy_environments.py:15, in step)",
    "die": "environment.name = 'toy_environments:Toy': it exited with status 3",
    "killed": "environment.name = 'toy_environments:Toy': it was killed by SIGKILL",
    "hang": KILLED,
    "stop": KILLED,
    "fork 36111": KILLED,
    "memory": "MemoryError (toy_environments.py:20, in step)",
    "write": "OSError: [Errno 27] File too large (toy_environments.py:22, in step)",
    'forge {"value"': KILLED,  # half an answer
    **dict.fromkeys(
        (
            'forge {"value": {"reward": NaN}}$',
            'forge {"value": {"messages": [{"role": "assistant", "content": ""}]}}$',
            'forge {"value": {"calls": -1}}$',
        ),
        "environment.name = 'toy_environments:Toy': its output is not an answer of at most 64 MiB",
    ),
    "infinite": "step returned inf, not a finite number",
}


@pytest.mark.slow
def test_each_bad_environment_fails_alone_with_its_reason(toys, capfd):
    toys.begin("good", "reset", {"start": "row"}, 1)
    answer(toys, "good")
    assert play(toys, *BAD) == BAD
    for text, reply in play(toys, "surrogate", "long").items():
        assert isinstance(reply, Reply), text
        assert len(reply.messages[0]["content"].encode()) <= 2**22
    toys.ask("good", "step", "on")
    assert answer(toys, "good") == Reply(messages=({"role": "user", "content": "on"},), reward=0.5)
    toys.end("good")
    out, err = capfd.readouterr()
    assert (out, "printed at import" in err) == ("", True)
    wait_until(lambda: not processes("36111"))


def test_an_episode_has_its_seed_its_row_and_an_empty_folder(toys):
    for row, start in (({"start": 5, "other": 1}, [5, 9]), ({"seed": 3}, ["begin", 3])):
        toys.begin("a", "reset", row, 9)
        assert json.loads(answer(toys, "a").messages[0]["content"]) == [*start, [], "1"]
        toys.ask("a", "step", "file")
        answer(toys, "a")
        toys.ask("a", "step", "last")
        assert answer(toys, "a") == Reply(reward=1.0, done=True)
        toys.ask("a", "finish")
        assert answer(toys, "a") == Reply(done=True)
        toys.end("a")


def test_the_scratch_folder_has_the_same_path_each_time_for_texts_and_observations(toys):
    replies = play(toys, "where", "where now", "open /longtail-environment")
    for text in ("where", "where now"):
        shown = replies[text].messages[0]["content"]
        assert shown == "/longtail-environment longtail-environment"
    assert isinstance(replies["open /longtail-environment"], Reply)


@pytest.mark.skipif(sys.platform != "linux", reason="the group of a new process has its keeper")
def test_a_long_row_does_not_wait_for_its_environment_and_no_more_than_most_begin(toys):
    with opened(most=1) as made:
        (process,) = made._idle
        os.killpg(process.keeper.pid, signal.SIGSTOP)
        made.begin("a", "reset", {"start": "x" * 2**20}, 1)
        assert made.answers(0.01) == []
        with pytest.raises(AssertionError, match="as many run as may"):
            made.begin("b", "reset", {}, 1)
        os.killpg(process.keeper.pid, signal.SIGCONT)
        assert len(answer(made, "a").messages[0]["content"]) > 2**20


def test_a_row_that_cannot_be_sent_and_an_episode_that_lasts_too_long_fail(toys, monkeypatch):
    toys.begin("a", "reset", {"start": lambda: 0}, 9)
    ((_, why),) = toys.answers(60.0)
    assert str(why).startswith("the row cannot be sent: ")
    toys.end("a")
    monkeypatch.setattr(toys, "_total_s", 0.5)
    assert "(the rest of its episode's time) and was killed" in str(play(toys, "hang"))


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize("has_namespaces", [True, False])
def test_no_process_outlives_an_episode_given_up_or_a_killed_worker(
    toys, monkeypatch, has_namespaces
):
    if not has_namespaces:
        monkeypatch.setattr(pool, "_namespaces", lambda network: ((), "forbidden"))
    elif not pool._namespaces(False)[0]:
        pytest.skip("this machine permits no namespaces")
    made = "open_environments(EnvironmentSection(name='toy_environments:Toy'), '', most=1)"
    worker = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "from longtail.config.rewards import EnvironmentSection\n"
            "from longtail.rl.environments.pool import open_environments\n"
            "from longtail.rl.processes import pool\n"
            f"pool._namespaces = lambda network: {pool._namespaces(False)}\n"
            f"toys = {made}; toys.begin('a', 'reset', {{}}, 1); toys.answers(60)\n"
            "toys.ask('a', 'step', 'bear 36222'); toys.answers(60); print(flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdout is not None
    with worker, worker.stdout as output:
        assert output.readline() == b"\n"
        wait_until(lambda: len(processes("36222")) >= 4)
        worker.kill()
    wait_until(lambda: not processes("36222"))
    toys._idle, idle = [], toys._idle  # so that a new process is begun
    toys.begin("a", "reset", {}, 1)
    answer(toys, "a")
    toys.ask("a", "step", "fork 36333")
    wait_until(lambda: len(processes("36333")) >= 3)
    toys.end("a")
    toys._idle += idle
    wait_until(lambda: not processes("36333"))


def test_an_environment_reaches_no_network_unless_it_may(toys):
    command, _ = pool._namespaces(False)
    said = " ".join(confinement())
    if not command:
        assert "environments reach the network and all files" in said
        assert "all processes of this user: no namespaces (" in said
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (why,) = play(toys, f"connect {port}").values()
        assert "Network is unreachable" in str(why) or "Connection refused" in str(why)
    assert "the network" not in said
    assert "reach the network" in " ".join(confinement(network=True))


def test_an_environment_that_cannot_be_loaded_is_refused_in_one_sentence(toys):
    for name, why in {
        "no_such_module:Toy": "no module no_such_module is in .*PYTHONPATH$",
        "textarena:No-v0": "'textarena:No-v0': ModuleNotFoundError: .*; pip install textarena$",
    }.items():
        with (
            opened(name) as bad,
            pytest.raises(ConfigError, match=f"^environment.name = .*{why}"),
        ):
            bad.first("tools")
    assert toys.first("tools") == []
