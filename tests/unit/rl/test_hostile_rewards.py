"""The pool survives rewards that fork, kill, daemonize or write on its channel."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longtail.errors import GradingError
from longtail.rl.grading.output import MAX_SHOWN
from longtail.rl.grading.pool import GraderPool
from longtail.rl.grading.process import MAX_MESSAGE
from longtail.types import Completion, FinishReason, Prompt

HOSTILE = '''
import ctypes, json, os, signal, socket, struct, subprocess, sys, threading, time

def everywhere(data):
    """Write on every descriptor but the standard ones: on the grader's channel, too."""
    for number in range(3, 64):
        try: os.write(number, data)
        except OSError: pass

def frame(message):
    payload = json.dumps(message).encode()
    return struct.pack("!I", len(payload)) + payload

def shout():
    while True: print("noise " * 100)

DAEMON = ("import os, sys, time; os.fork() and os._exit(0); os.setsid(); "
          "open(sys.argv[1], 'w').write(str(os.getpid())); os.rename(sys.argv[1], sys.argv[2]); "
          "time.sleep(3600)")

def act(completions, pid_file=(None,), **columns):
    match completions[0].split()[0]:
        case "fork": os.fork()
        case "c fork": ctypes.CDLL(None).fork()
        case "junk": everywhere(b"printed by mistake\\n")
        case "zeros": everywhere(bytes(1 << 20))
        case "length": everywhere(struct.pack("!I", 1 << 30))
        case "cut": everywhere(struct.pack("!I", 100) + b"[")
        case "binary": everywhere(struct.pack("!I", 4) + b"\\xff\\xfe\\xfd\\xfc")
        case "deep": everywhere(struct.pack("!I", 60_000) + b"[" * 60_000)
        case "digits": everywhere(struct.pack("!I", 5_000) + b"9" * 5_000)
        case "begun": everywhere(frame({"begun": True}))
        case "ready": everywhere(frame({"ready": True}))
        case "other": everywhere(frame([99, 1.0, None]))
        case "nan": everywhere(b"\\0\\0\\0\\x0e[1, NaN, null]")
        case "close": os.closerange(0, 256)
        case "shutdown": socket.socket(fileno=3).shutdown(socket.SHUT_RDWR)
        case "group": os.killpg(0, signal.SIGKILL)
        case "parent":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(3600)
        case "parent's": os.killpg(os.getpgid(os.getppid()), signal.SIGTERM)
        case "recursion": act(completions)
        case "huge": return ["x" * 10_000_000]
        case "integer": return [10 ** 5_000]
        case "surrogate": raise ValueError("half \\ud83d a pair \\x1b[2J")
        case "unprintable":
            class Odd(Exception):
                def __str__(self): raise ValueError
            raise Odd
        case "chdir": os.chdir("/")
        case "stdin": sys.stdin.read()
        case "alarm": signal.setitimer(signal.ITIMER_REAL, 0.05)
        case "slow": time.sleep(0.3)
        case "handlers":
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
        case "noise": print("noise " * 1_000_000, flush=True)
        case "shout": threading.Thread(target=shout, daemon=True).start()
        case "daemon":
            subprocess.run([sys.executable, "-c", DAEMON, pid_file[0] + ".new", pid_file[0]])
            while not os.path.exists(pid_file[0]): time.sleep(0.01)
    return [float(completions[0].split()[-1])]
'''


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "hostile_rewards.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(tmp_path)
    return "hostile_rewards:act"


def pairs(*texts: str, **data: str) -> list[tuple[Prompt, Completion]]:
    return [
        (
            Prompt(prompt_id=f"train/{number}", tokens=(1, 2), text="6*7=", data=data),
            Completion(
                request_id=f"train/{number}#0",
                tokens=(5,),
                logprobs=(-0.5,),
                text=text,
                finish_reason=FinishReason.STOP,
                policy_version=0,
            ),
        )
        for number, text in enumerate(texts)
    ]


def is_over(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_over(pid: int) -> None:
    end = time.monotonic() + 60
    while not is_over(pid):
        assert time.monotonic() < end, f"process {pid} has not ended"
        time.sleep(0.01)


INVALID = "the grader was killed: something wrote on its channel that is no answer of a grader"
KILLED = "the grader was killed by SIGKILL while grading"
FAILURES = {
    "junk": INVALID,
    "zeros": INVALID,
    "length": INVALID,
    "cut": INVALID,
    "binary": INVALID,
    "deep": INVALID,
    "digits": INVALID,
    "begun": INVALID,
    "ready": INVALID,
    "other": INVALID,
    "nan": INVALID,
    "close": "the grader exited with status ",
    "shutdown": KILLED,
    "group": KILLED,
    "parent": KILLED,
    "recursion": "RecursionError: maximum recursion depth exceeded",
    "huge": "reward 'hostile_rewards:act' returned str 'xxx",
    "integer": "OverflowError: int too large to convert to float",
    "surrogate": "ValueError: half   a pair  [2J",
    "unprintable": "hostile_rewards.act.<locals>.Odd: <exception str() failed>",
}


@pytest.mark.slow
def test_each_hostile_task_fails_alone_and_all_others_are_graded(hostile: str) -> None:
    texts = [text for number, bad in enumerate(FAILURES) for text in (f"ok {number}", bad)]
    with GraderPool(hostile, timeout_s=60.0) as pool:
        graded = pool.grade(pairs(*texts, "ok -1"))
    assert [rollout.reward for rollout in graded.rollouts] == [*range(len(FAILURES)), -1]
    found = {failure.completion.text: failure.error for failure in graded.failures}
    assert list(found) == list(FAILURES)
    for bad, error in FAILURES.items():
        assert found[bad].startswith(error), bad
        assert found[bad].isprintable(), bad


@pytest.mark.slow
@pytest.mark.parametrize("harmless", ["fork", "parent's", "chdir", "stdin", "handlers", "alarm"])
def test_changes_of_a_reward_to_its_process_affect_no_other_task(
    hostile: str, harmless: str
) -> None:
    with GraderPool(hostile, timeout_s=60.0) as pool:
        graded = pool.grade(pairs(f"{harmless} 1", "slow 2", "ok 3"))
        again = pool.grade(pairs("ok 4"))
    assert [rollout.reward for rollout in (*graded.rollouts, *again.rollouts)] == [1, 2, 3, 4]


def test_a_fork_unknown_to_python_ends_the_grader_not_the_run(hostile: str) -> None:
    with GraderPool(hostile, timeout_s=60.0) as pool:
        graded = pool.grade(pairs("ok 1", "c fork 2", "ok 3", "ok 4"))
        again = pool.grade(pairs("ok 5"))
    assert len(graded.rollouts) + len(graded.failures) == 4
    assert {failure.error for failure in graded.failures} <= {INVALID}
    assert [rollout.reward for rollout in again.rollouts] == [5.0]


def test_an_error_of_a_grader_fits_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wordy.py").write_text(
        "def f(**columns): raise type('E' + '\\U00020000' * 5_000, (Exception,), {})('x' * 5_000)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with GraderPool("wordy:f") as pool:
        (failure,) = pool.grade(pairs("1")).failures
    assert failure.error != INVALID
    assert len(failure.error) < MAX_MESSAGE / 12


# ------------------------------------------------------------------------------ output


def test_output_of_a_reward_is_cut(hostile: str, capfd: pytest.CaptureFixture[str]) -> None:
    with GraderPool(hostile, workers=2, timeout_s=60.0) as pool:
        assert len(pool.grade(pairs("noise 1", "noise 2", "noise 3")).rollouts) == 3
        assert len(pool.grade(pairs("noise 4")).rollouts) == 1
    printed = capfd.readouterr().err
    assert printed.count("(longtail: the reward prints more; it is not shown)") <= 2
    assert MAX_SHOWN <= len(printed) < 2 * MAX_SHOWN + 200


def test_a_thread_that_prints_for_ever_ends_with_its_grader(
    hostile: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with GraderPool(hostile, timeout_s=60.0) as pool:
        assert len(pool.grade(pairs("shout 1", "ok 2")).rollouts) == 2
        assert len(pool.grade(pairs("ok 3")).rollouts) == 1
        pids = pool.pids
    assert all(is_over(pid) for pid in pids)
    assert len(capfd.readouterr().err) < 2 * MAX_SHOWN + 200


# ------------------------------------------------------------------------------ processes


def test_a_daemon_that_a_reward_started_ends_with_the_pool(hostile: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with GraderPool(hostile, timeout_s=60.0) as pool:
        graded = pool.grade(pairs("daemon 1", pid_file=str(pid_file)))
        assert [rollout.reward for rollout in graded.rollouts] == [1.0]
        pid = int(pid_file.read_text())
        assert not is_over(pid)
    assert is_over(pid)


def test_a_daemon_that_a_reward_started_ends_with_its_killed_grader(
    hostile: str, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    with GraderPool(hostile, timeout_s=60.0) as pool:
        pool.grade(pairs("daemon 1", pid_file=str(pid_file)))
        pool.grade(pairs("group"))
        assert is_over(int(pid_file.read_text()))


@pytest.mark.slow
def test_a_daemon_that_a_reward_started_ends_with_the_killed_run(
    hostile: str, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    program = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from test_hostile_rewards import pairs; from longtail.rl.grading.pool import GraderPool\n"
        f"pool = GraderPool({hostile!r}, timeout_s=60.0)\n"
        "print(pool.grade(pairs('daemon 1', pid_file=sys.argv[1])).rollouts[0].reward, flush=True)"
        "\nsys.stdin.read()"
    )
    words = [
        sys.executable,
        "-c",
        program,
        str(pid_file),
        str(tmp_path),
        str(Path(__file__).parent),
    ]
    run = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with run:
        assert run.stdout is not None
        assert run.stdout.readline() == "1.0\n"
        pid = int(pid_file.read_text())
        assert not is_over(pid)
        run.kill()
    wait_until_over(pid)


# ------------------------------------------------------------------------------ loading


def test_no_module_of_the_working_directory_replaces_a_standard_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here.py").write_text(
        "import csv, json\ndef f(**columns): return [float(bool(json.loads('1') and csv.reader))]"
    )
    for name in ("json", "csv", "socket", "pickle", "traceback", "longtail"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'a').write(__name__)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # as `python -c` does
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m` does
    with GraderPool("here:f") as pool:
        assert [rollout.reward for rollout in pool.grade(pairs("1")).rollouts] == [1.0]
    assert not Path("executed").exists()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_a_grader_killed_from_outside_while_it_loads_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    flag = tmp_path / "flag"
    (tmp_path / "shot.py").write_text(
        "import os, signal\nfrom pathlib import Path\n"
        f"if not Path({str(flag)!r}).exists():\n"
        f"    Path({str(flag)!r}).touch(); os.kill(os.getpid(), signal.{how})\n"
        "def f(**columns): return [1.0]"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with GraderPool("shot:f") as pool:
        pool.wait_ready()
        assert len(pool.grade(pairs("1")).rollouts) == 1


def test_the_error_of_graders_killed_while_they_load_does_not_name_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "doomed.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.syspath_prepend(tmp_path)
    with GraderPool("doomed:f") as pool, pytest.raises(GradingError) as raised:
        pool.wait_ready()
    assert "reward.name" not in str(raised.value)
    assert "was killed by SIGKILL before it had loaded the reward" in str(raised.value)
    assert "reward.workers" in str(raised.value)


def test_a_reward_module_that_forks_while_it_loads_is_loaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "forking.py").write_text("import os; os.fork()\ndef f(**columns): return [1.0]")
    monkeypatch.syspath_prepend(tmp_path)
    with GraderPool("forking:f") as pool:
        assert len(pool.grade(pairs("1", "2", "3")).rollouts) == 3


def test_a_stopped_supervisor_is_killed(hostile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtail.rl.grading.process.REAP_S", 0.2)
    with GraderPool(hostile) as pool:
        pool.wait_ready()
        pids = pool.pids
        os.kill(pids[0], signal.SIGSTOP)
    assert all(is_over(pid) for pid in pids)
