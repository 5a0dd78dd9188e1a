"""Graders: each bad task fails alone and with its reason.

What their processes are is in environments/test_pool.py.
"""

import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from longtail.config.rewards import RewardSection
from longtail.errors import ConfigError
from longtail.rl.grading.pool import GraderPool
from longtail.system import machine
from longtail.system.machine import Memory
from longtail.types import Completion, Prompt
from support.rollouts import completion

TOY = '''
import os, re, signal, sys, time

def act(completions, **columns):
    """Perform the action that the first completion names; numbers are rewards."""
    with open("calls", "a") as file:
        file.write(" ".join(completions) + "\\n")
    match completions[0].split()[0]:
        case "raise": raise ValueError("no way")
        case "killed": os.kill(os.getpid(), signal.SIGKILL)
        case "sleep": time.sleep(3600)
        case "surrogate": raise ValueError("half \\ud83d a pair \\x1b[2J")
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


KILLED = "reward.name = 'toy_rewards:act': it gave no answer in 3 s and was killed"
BAD = {
    "raise": "ValueError: no way (toy_rewards.py:9, in act)",
    "killed": "reward.name = 'toy_rewards:act': it was killed by SIGKILL",
    "surrogate": "ValueError: half   a pair  [2J",
}


NONE = "reward 'toy_rewards:act' returned None: it does not apply to this completion"


@pytest.mark.slow
def test_each_bad_task_fails_alone_and_all_others_are_graded(toy):
    texts = [text for number, bad in enumerate(BAD) for text in (f"ok {number}", bad)]
    with GraderPool(RewardSection(name=toy, workers=3, timeout_s=3.0)) as pool:
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
        "killed": BAD["killed"],
        "short": "reward 'toy_rewards:act' returned 0 rewards for 2 completions",
    }
    groups = [group for name in bad for group in (["a", "bb"], [name, "bb"])]
    groups.append(["a", "skip", "bb"])  # of which one has no reward
    with GraderPool(RewardSection(name=toy, per="group", timeout_s=3.0)) as pool:
        graded = pool.grade(pairs(*groups))
    assert [r.reward for r in graded.rollouts] == [0.0, 0.125] * (len(bad) + 1)
    failures = [(failure.completion.text, failure.error) for failure in graded.failures]
    expected = [(text, bad[name]) for name in bad for text in (name, "bb")]
    assert failures == [*expected, ("skip", NONE)]
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
    assert failure.error.startswith("the row cannot be sent: ")


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


def test_a_grader_that_died_between_calls_is_replaced(toy):
    with GraderPool(RewardSection(name=toy)) as pool:
        (pid,) = rewards(pool, "pid")
        os.kill(int(pid), signal.SIGKILL)
        (process,) = pool._idle
        process.keeper.wait()
        assert rewards(pool, "pid") != [pid]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def g(): ...", r"^reward\.name = 'bad_start:f'.* has no attribute 'f'"),
        ("raise OSError('no licence')", r"^reward\.name = 'bad_start:f'.*no licence"),
        ("import sys; sys.exit('bye')", "^reward.*SystemExit: bye"),
        ("import os; os._exit(7)", "^reward.*'bad_start:f': it exited with status 7"),
        ("import time; time.sleep(3600)", "^reward.*'bad_start:f': it gave no answer in 0.5 s"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_refused(tmp_path, monkeypatch, source, why):
    (tmp_path / "bad_start.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    if "sleep" in source:
        monkeypatch.setattr("longtail.rl.processes.pool._LOADING_S", 0.5)
    with (
        GraderPool(RewardSection(name="bad_start:f")) as pool,
        pytest.raises(ConfigError, match=why),
    ):
        pool.check([])
