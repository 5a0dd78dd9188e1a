"""Graders: each bad task fails alone and with its reason, and no process outlives the run."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from longtail.config.rewards import RewardSection
from longtail.errors import ConfigError, GradingError
from longtail.rl.grading.pool import GraderPool
from longtail.system import machine
from longtail.system.machine import Memory
from longtail.types import Completion, Prompt
from support.rollouts import completion
from support.waiting import wait_until

TOY = '''
import os, re, signal, sys, time

def act(completions, **columns):
    """Perform the action that the first completion names; numbers are rewards."""
    with open("calls", "a") as file:
        file.write(" ".join(completions) + "\\n")
    match completions[0].split()[0]:
        case "raise": raise ValueError("no way")
        case "exit": sys.exit(3)
        case "die": os._exit(3)
        case "killed": os.kill(os.getpid(), signal.SIGKILL)
        case "segfault": os.kill(os.getpid(), signal.SIGSEGV)
        case "stop": os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep": time.sleep(3600)
        case "regex": re.match("(a+)+$", "a" * 64 + "b")
        case "memory":
            kept = []
            while True: kept.append(bytes(1 << 28))
        case "recursion": return act(completions)
        case "surrogate": raise ValueError("half \\ud83d a pair \\x1b[2J")
        case "none": return [None]
        case "short": return []
        case "print": print("printed by a reward, \u00e9" * 10_000, flush=True)
        case "stdin": sys.stdin.read()
        case "alarm": signal.setitimer(signal.ITIMER_REAL, 0.05)
        case "slow": time.sleep(0.3)
        case "torch": return [float("torch" in sys.modules)]
        case "pid": return [float(os.getpid())]
        case "tuple": return [float(columns["shape"] == [((1, 2), {3: {4}})])]
    order = sorted(completions, key=len)
    ranks = [None if text == "skip" else order.index(text) / 8 for text in completions]
    return ranks if len(ranks) > 1 else [float(completions[0].split()[-1])]
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "toy_rewards.py").write_text(TOY)
    monkeypatch.chdir(tmp_path)  # where rewards are found
    return "toy_rewards:act"


def pairs(*groups: str | list[str], **data: object) -> list[tuple[Prompt, Completion]]:
    """Return completions with their prompts; one prompt for each text or list of texts."""
    return [
        (
            Prompt(
                prompt_id=f"p/{number}", tokens=(1, 2), text="6*7=", data={"answer": "42", **data}
            ),
            completion(f"p/{number}@0#{sample}", (5,), text=text),
        )
        for number, group in enumerate(groups)
        for sample, text in enumerate([group] if isinstance(group, str) else group)
    ]


def rewards(pool: GraderPool, *texts: str, **data: object) -> list[float]:
    graded = pool.grade(pairs(*texts, **data))
    assert graded.failures == ()
    return [rollout.reward for rollout in graded.rollouts]


def is_over(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_reward_gets_rows_with_their_types_and_a_process_of_its_own(toy, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")  # and may print any text
    assert "torch" in sys.modules
    with GraderPool(RewardSection(name=toy)) as pool:
        assert rewards(pool, "tuple", shape=((1, 2), {3: {4}})) == [1.0]
        assert rewards(pool, "torch") == [0.0]
        assert rewards(pool, "print 1", "stdin 2", "alarm 3", "slow 4") == [1, 2, 3, 4]
    assert capfd.readouterr().out == ""  # what a reward prints goes to stderr


def test_a_reward_knows_whether_the_prompt_opened_a_thought():
    ((prompt, said),) = pairs("42")
    with GraderPool(RewardSection(name="last_number")) as pool:
        opened = replace(prompt, text="<user>6*7=<assistant><think>\n")
        graded = pool.grade([(prompt, said), (opened, said)])
    assert [rollout.reward for rollout in graded.rollouts] == [1.0, 0.0]


def test_more_graders_than_a_host_has_room_for_are_refused(toy, monkeypatch):
    for cores, free, most in ((1, 10**12, 32), (2, 10**9, 22), (1, None, 32)):
        monkeypatch.setattr(machine, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr(machine, "memory", lambda free=free: Memory(total=free, available=free))
        with pytest.raises(ConfigError, match=f"reward.workers = 1000: .*at most {most}$"):
            GraderPool(RewardSection(name=toy, workers=1000))


KILLED = "the grader gave no result in 4 s and was killed"
BAD = {
    "raise": "ValueError: no way (toy_rewards.py:9, in act)",
    "exit": "SystemExit: 3 (toy_rewards.py:10, in act)",
    "die": "the grader exited with status 3 while grading",
    "killed": "the grader was killed by SIGKILL while grading",
    "segfault": "the grader was killed by SIGSEGV while grading",
    "stop": KILLED,
    "regex": KILLED,
    "memory": "MemoryError (toy_rewards.py:19, in act)",
    "recursion": "RecursionError: maximum recursion depth exceeded",
    "surrogate": "ValueError: half   a pair  [2J",
    "none": "reward 'toy_rewards:act' returned None: it does not apply to this completion",
    "short": "reward 'toy_rewards:act' returned 0 rewards for 1 completion",
}


@pytest.mark.slow
def test_each_bad_task_fails_alone_and_all_others_are_graded(toy):
    texts = [text for number, bad in enumerate(BAD) for text in (f"ok {number}", bad)]
    with GraderPool(RewardSection(name=toy, workers=3, timeout_s=4.0)) as pool:
        graded = pool.grade(pairs(*texts, "ok -1"))
    assert [rollout.reward for rollout in graded.rollouts] == [*range(len(BAD)), -1]
    assert [failure.completion.text for failure in graded.failures] == list(BAD)
    for failure, (bad, error) in zip(graded.failures, BAD.items(), strict=True):
        assert failure.error.startswith(error), bad
        assert failure.error.isprintable(), bad


@pytest.mark.slow
def test_a_failed_call_excludes_its_group_alone_and_is_not_repeated(toy, tmp_path):
    bad = {
        "raise": BAD["raise"],
        "sleep": KILLED,
        "die": BAD["die"],
        "short": "reward 'toy_rewards:act' returned 0 rewards for 2 completions",
    }
    groups = [group for name in bad for group in (["a", "bb"], [name, "bb"])]
    groups.append(["a", "skip", "bb"])  # of which one has no reward
    with GraderPool(RewardSection(name=toy, per="group", timeout_s=4.0)) as pool:
        graded = pool.grade(pairs(*groups))
    assert [r.reward for r in graded.rollouts] == [0.0, 0.125] * (len(bad) + 1)
    failures = [(failure.completion.text, failure.error) for failure in graded.failures]
    expected = [(text, bad[name]) for name in bad for text in (name, "bb")]
    assert failures == [*expected, ("skip", BAD["none"])]
    assert len((tmp_path / "calls").read_text().splitlines()) == len(groups)


@pytest.mark.slow
def test_a_time_limit_applies_to_one_completion_not_to_all(toy):
    with GraderPool(RewardSection(name=toy, timeout_s=1.0)) as pool:  # 5 times 0.3 s
        assert rewards(pool, *["slow 1"] * 5) == [1.0] * 5


def test_a_row_that_cannot_be_sent_fails_alone():
    bad = pairs("42", helper=lambda: None)
    with GraderPool(RewardSection(name="exact")) as pool:
        graded = pool.grade([*pairs("42"), *bad, *pairs("41")])
    assert [rollout.reward for rollout in graded.rollouts] == [1.0, 0.0]
    (failure,) = graded.failures
    assert failure.error.startswith("the row cannot be sent to a grader: ")


def test_an_interrupted_call_leaves_nothing_to_the_next(toy):
    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with GraderPool(RewardSection(name=toy, timeout_s=600.0)) as pool:
        pool.wait_ready()
        timer = threading.Timer(0.2, interrupt)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.grade(pairs("ok 1", "sleep", "ok 2"))
        timer.join()
        assert rewards(pool, "ok 3", "ok 4") == [3.0, 4.0]


@pytest.mark.slow
def test_graders_that_died_between_calls_fail_no_task_and_closing_leaves_no_process(toy):
    with GraderPool(RewardSection(name=toy, workers=2, timeout_s=600.0)) as pool:
        dead = {int(pid) for pid in rewards(pool, *["pid"] * 20)}
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        alive = {int(pid) for pid in rewards(pool, *["pid"] * 100)}
        assert not alive & dead
        # One that lived may have answered before pebble gave its pool up and killed it.
        assert not all(is_over(pid) for pid in alive)
    assert all(is_over(pid) for pid in alive)
    pool.close()


@pytest.mark.slow
def test_graders_end_when_their_parent_is_killed(toy, tmp_path):
    (tmp_path / "hanging.py").write_text(
        "import os, re\n"
        "def act(**columns):\n"
        "    open(f'pid{os.getpid()}', 'w').close()\n"
        "    re.match('(a+)+$', 'a' * 64 + 'b')  # never lets another thread run\n"
    )
    (tmp_path / "run.py").write_text(
        "import sys; sys.path += sys.argv[1:]\n"
        "if __name__ == '__main__':\n"
        "    from test_grading_pool import GraderPool, RewardSection, pairs\n"
        "    own = RewardSection(name='hanging:act', workers=2, timeout_s=600)\n"
        "    GraderPool(own).grade(pairs('1', '2'))\n"
    )
    here = Path(__file__).parent
    words = [sys.executable, "run.py", str(here), str(here.parents[1])]
    parent = subprocess.Popen(words, cwd=tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("pid*"))) == 2)
    pids = [int(path.name[3:]) for path in tmp_path.glob("pid*")]
    assert not any(is_over(pid) for pid in pids)
    parent.kill()
    parent.wait()
    wait_until(lambda: all(is_over(pid) for pid in pids))


ONCE = """
import os
if os.path.exists("used"): {}
open("used", "w").close()
def f(**columns): os._exit(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "error", "why"),
    [
        ("def g(): ...", ConfigError, r"reward\.name = 'bad_start:f'.* has no attribute 'f'"),
        ("raise OSError('no licence')", ConfigError, r"reward\.name = 'bad_start:f'.*no licence"),
        ("import sys; sys.exit('bye')", ConfigError, "SystemExit: bye"),
        ("import os; os._exit(7)", GradingError, r"'bad_start:f'.* ended 3 times in a row"),
        ("import time; time.sleep(3600)", GradingError, "no grader has begun a task in 3 s"),
        (ONCE.format("raise OSError('disk gone')"), ConfigError, "disk gone"),
        (
            ONCE.format("os.kill(os.getpid(), 9)"),
            GradingError,
            r"if memory is short, lower reward\.workers",
        ),
    ],
)
def test_a_reward_that_cannot_be_loaded_or_not_again_ends_the_run(
    tmp_path, monkeypatch, source, error, why
):
    (tmp_path / "bad_start.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    wait_s = 1.5 if "sleep" in source else 60.0
    monkeypatch.setattr("longtail.rl.grading.pool._STARTING_S", wait_s)
    monkeypatch.setattr("longtail.rl.grading.pool._KILLING_S", 0.0)
    own = RewardSection(name="bad_start:f", timeout_s=wait_s)
    with GraderPool(own) as pool, pytest.raises(error, match=why):
        pool.grade(pairs("a", "b", "c"))
