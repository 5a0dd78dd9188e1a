import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from longtail.errors import ConfigError, GradingError
from longtail.rl.grading.grader import MAX_GROUP
from longtail.rl.grading.pool import GraderPool
from longtail.types import Completion, FinishReason, Prompt

TOY = '''
import os, re, signal, subprocess, sys, time

def act(completions, **columns):
    """Perform the action that the completion names."""
    said = completions[0]
    match said.split()[0]:
        case "raise": raise ValueError("no way")
        case "exit": sys.exit(3)
        case "die": os._exit(3)
        case "killed": os.kill(os.getpid(), signal.SIGKILL)
        case "segfault": os.kill(os.getpid(), signal.SIGSEGV)
        case "stop": os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep": time.sleep(3600)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)
        case "regex": re.match("(a+)+$", "a" * 64 + "b")
        case "none": return [None]
        case "nan": return [float("nan")]
        case "short": return []
        case "long": return [1.0, 1.0]
        case "word": return ["good"]
        case "print": print("printed by a reward", flush=True)
        case "torch": return [float("torch" in sys.modules)]
        case "tuple": return [float(columns["shape"] == [((1, 2), {3: {4}})])]
        case "child":
            child = subprocess.Popen(["sleep", "3600"])
            open(columns["pid_file"][0], "w").write(str(child.pid))
            time.sleep(3600)
    return [float(said.split()[-1])]
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    (tmp_path / "toy_rewards.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    return "toy_rewards:act"


def pair(text, number=0, answer="42", **data):
    prompt = Prompt(
        prompt_id=f"train/{number}", tokens=(1, 2), text="6*7=", data={"answer": answer, **data}
    )
    completion = Completion(
        request_id=f"train/{number}#0",
        tokens=(5,),
        logprobs=(-0.5,),
        text=text,
        finish_reason=FinishReason.STOP,
        policy_version=0,
    )
    return prompt, completion


def pairs(*texts):
    return [pair(text, number) for number, text in enumerate(texts)]


def is_gone(pid):
    """Whether no process, not even a zombie, has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def is_zombie(pid):
    """Whether a process that is not our child has ended, reaped or not."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def children_of(pid):
    """The children of the main thread of a process: those of a supervisor, which has no other."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition):
    """Wait until a condition holds, at most a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the condition did not hold within a minute"
        time.sleep(0.01)


# ------------------------------------------------------------------------------ good graders


def test_rewards_come_in_input_order_with_their_prompts_and_completions():
    given = [pair(str(number % 3), number, answer="1") for number in range(500)]
    with GraderPool("exact", workers=2) as pool:
        graded = pool.grade(given)
    assert [(r.prompt, r.completion) for r in graded.rollouts] == given
    assert [r.reward for r in graded.rollouts] == [float(n % 3 == 1) for n in range(500)]
    assert graded.failures == ()


def test_an_empty_list_has_an_empty_result():
    with GraderPool("exact") as pool:
        graded = pool.grade([])
    assert (graded.rollouts, graded.failures) == ((), ())


RANK = '''
import os, time

def rank(prompts, completions, completion_ids, answer, **columns):
    """Rank completions by length; write down each call."""
    with open("calls", "a") as file:
        file.write(" ".join([prompts[0], *completions]) + "\\n")
    assert len(set(prompts)) == 1 and len(answer) == len(completion_ids) == len(completions)
    match completions[0]:
        case "raise": raise ValueError("no way")
        case "hang": time.sleep(3600)
        case "die": os._exit(3)
        case "short": return [0.0]
        case "dict": return {"a": 1.0}
    order = sorted(completions, key=len)
    return [None if text == "none" else order.index(text) / 8 for text in completions]
'''


@pytest.fixture
def ranking(tmp_path, monkeypatch):
    (tmp_path / "ranking.py").write_text(RANK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return "ranking:rank"


def _group_pairs(*groups):
    """Return pairs of prompt and completion, of one prompt for each group of texts."""
    return [
        (
            Prompt(prompt_id=f"p/{number}", tokens=(1,), text=f"p{number}", data={"answer": "4"}),
            replace(pair(text)[1], request_id=f"p/{number}@0#{sample}"),
        )
        for number, texts in enumerate(groups)
        for sample, text in enumerate(texts)
    ]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_function_that_compares_gets_each_group_once_and_whole(ranking, tmp_path, workers):
    groups = [["a" * (n % 5), "b" * (n % 3), "c" * 7] for n in range(40)]
    with GraderPool(ranking, workers=workers, by_group=True) as pool:
        graded = pool.grade(_group_pairs(*groups))
    assert [r.completion.text for r in graded.rollouts] == [t for g in groups for t in g]
    assert [r.reward for r in graded.rollouts] == [
        sorted(group, key=len).index(text) / 8 for group in groups for text in group
    ]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sorted(calls) == sorted(" ".join([f"p{n}", *g]) for n, g in enumerate(groups))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("raise", "ValueError: no way"),
        ("hang", "gave no result in 1 s and was killed"),
        ("die", "exited with status 3 while grading"),
        ("short", "returned 1 rewards for 2 completions"),
        ("dict", "returned dict .*, not a list of numbers"),
    ],
)
def test_a_failed_call_excludes_its_group_alone_and_is_not_repeated(ranking, tmp_path, bad, why):
    groups = [["a", "bb"], [bad, "bb"], ["ccc", "d"]]
    with GraderPool(ranking, by_group=True, timeout_s=1.0) as pool:
        graded = pool.grade(_group_pairs(*groups))
    assert [r.reward for r in graded.rollouts] == [0.0, 0.125, 0.125, 0.0]
    assert [f.completion.text for f in graded.failures] == [bad, "bb"]
    assert all(re.search(why, failure.error) for failure in graded.failures)
    assert len((tmp_path / "calls").read_text().splitlines()) == 3


def test_a_completion_of_a_group_to_which_a_reward_does_not_apply_is_excluded_alone(ranking):
    with GraderPool(ranking, by_group=True) as pool:
        graded = pool.grade(_group_pairs(["a", "none", "bb"]))
    assert [r.reward for r in graded.rollouts] == [0.0, 0.125]
    (failure,) = graded.failures
    assert failure.completion.text == "none"
    assert "returned None: it does not apply" in failure.error


def test_a_group_of_errors_fits_in_a_message(ranking, tmp_path):
    (tmp_path / "long_errors.py").write_text(
        "def f(completions, **_): return ['\\U0001f600' * 500] * len(completions)\n"
    )
    with GraderPool("long_errors:f", by_group=True) as pool:
        graded = pool.grade(_group_pairs(["x"] * MAX_GROUP))
    assert len(graded.failures) == MAX_GROUP
    assert "not a number" in graded.failures[-1].error


@pytest.mark.slow
def test_math_verify_grades_in_the_pool():
    pytest.importorskip("math_verify")
    with GraderPool("math_verify") as pool:
        graded = pool.grade([pair(r"so \boxed{1/2}", 0, "0.5"), pair("so 0.4", 1, "0.5")])
    assert [rollout.reward for rollout in graded.rollouts] == [1.0, 0.0]


def test_a_reward_may_use_math_verifys_own_alarms(tmp_path, monkeypatch):
    pytest.importorskip("math_verify")
    (tmp_path / "alarmed.py").write_text(
        "from math_verify import parse, verify\n"
        "def score(completions, answer, **columns):\n"
        "    return [float(verify(parse(a), parse(c))) for a, c in zip(answer, completions)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with GraderPool("alarmed:score") as pool:
        graded = pool.grade([pair(r"so \boxed{1/2}", 0, "0.5")])
    assert [rollout.reward for rollout in graded.rollouts] == [1.0]


@pytest.mark.slow
def test_answers_of_reasoning_gym_reach_the_grader_unchanged():
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("rearc", size=1, seed=3)[
        0
    ]  # its scorer distinguishes tuples from lists
    data = {"reasoning_gym_task": "rearc", "reasoning_gym_entry": entry}
    with GraderPool("reasoning_gym") as pool:
        graded = pool.grade([pair(entry["answer"], 0, entry["answer"], **data)])
    assert [rollout.reward for rollout in graded.rollouts] == [1.0]


def test_rows_reach_a_reward_with_their_types(toy):
    with GraderPool(toy) as pool:
        graded = pool.grade([pair("tuple", shape=((1, 2), {3: {4}}))])
    assert [rollout.reward for rollout in graded.rollouts] == [1.0]


def test_a_grader_does_not_import_torch(toy):
    assert "torch" in sys.modules
    with GraderPool(toy) as pool:
        (rollout,) = pool.grade(pairs("torch")).rollouts
    assert rollout.reward == 0.0


def test_output_of_a_reward_goes_to_stderr(toy, capfd):
    with GraderPool(toy) as pool:
        pool.grade(pairs("print 1"))
    printed = capfd.readouterr()
    assert "printed by a reward" in printed.err
    assert printed.out == ""


def test_a_reward_module_is_found_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "here_rewards.py").write_text("def one(**columns): return [1.0]")
    monkeypatch.chdir(tmp_path)
    with GraderPool("here_rewards:one") as pool:
        pool.wait_ready()


# ------------------------------------------------------------------------------ bad graders

BAD = {
    "raise": "ValueError: no way (toy_rewards.py:8, in act)",
    "exit": "SystemExit: 3 (toy_rewards.py:9, in act)",
    "die": "the grader exited with status 3 while grading",
    "killed": "the grader was killed by SIGKILL while grading",
    "segfault": "the grader was killed by SIGSEGV while grading",
    "stop": "the grader gave no result in 1 s and was killed",
    "sleep": "the grader gave no result in 1 s and was killed",
    "deaf": "the grader gave no result in 1 s and was killed",
    "regex": "the grader gave no result in 1 s and was killed",
    "none": "reward 'toy_rewards:act' returned None: it does not apply to this completion",
    "nan": "reward 'toy_rewards:act' returned nan: a reward must be finite",
    "short": "reward 'toy_rewards:act' returned 0 rewards for 1 completion",
    "long": "reward 'toy_rewards:act' returned 2 rewards for 1 completion",
    "word": "reward 'toy_rewards:act' returned str 'good', not a number",
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_each_bad_task_fails_alone_and_all_others_are_graded(toy, workers):
    texts = [text for number, bad in enumerate(BAD) for text in (f"ok {number}", bad)]
    given = pairs(*texts, "ok -1", "ok -2")
    with GraderPool(toy, workers=workers, timeout_s=1.0) as pool:
        graded = pool.grade(given)
        assert len(pool.pids) == workers
    assert [rollout.reward for rollout in graded.rollouts] == [*range(len(BAD)), -1, -2]
    assert [rollout.completion.text for rollout in graded.rollouts] == [
        text for text in [*texts, "ok -1", "ok -2"] if text.startswith("ok")
    ]
    assert {f.completion.text: f.error for f in graded.failures} == BAD
    assert [f.completion.text for f in graded.failures] == list(BAD)


@pytest.mark.slow
def test_a_time_limit_applies_to_one_completion_not_to_the_batch(tmp_path, monkeypatch):
    # 15 completions of 0.1 s in one worker take 1.5 s in all, more than the limit of each
    (tmp_path / "slow.py").write_text(
        "import time\ndef score(**columns):\n    time.sleep(0.1)\n    return [1.0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with GraderPool("slow:score", timeout_s=1.0) as pool:
        assert len(pool.grade(pairs(*["x"] * 15)).rollouts) == 15


def test_a_row_that_cannot_be_sent_fails_alone():
    given = [pair("42", 0), pair("42", 1, helper=lambda: None), pair("41", 2)]
    with GraderPool("exact") as pool:
        graded = pool.grade(given)
    assert [rollout.reward for rollout in graded.rollouts] == [1.0, 0.0]
    (failure,) = graded.failures
    assert failure.error.startswith("the row of train/1 cannot be sent: ")


def test_a_grader_that_died_between_calls_fails_no_task():
    with GraderPool("exact", workers=2) as pool:
        pool.grade(pairs("42"))
        dead = pool.pids
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        graded = pool.grade(pairs(*["42"] * 100))
        assert len(graded.rollouts) == 100
        assert set(pool.pids) != set(dead)  # one that got no task may still be listed
        assert all(is_gone(pid) for pid in dead)


@pytest.mark.slow
def test_a_stopped_grader_cannot_block_the_sender(toy):
    with GraderPool(toy, timeout_s=1.0) as pool:
        pool.wait_ready()
        (grader,) = children_of(pool.pids[0])
        os.kill(grader, signal.SIGSTOP)
        graded = pool.grade(pairs(*["ok " + " " * 1_000_000 + "1"] * 8))  # more than a socket holds
    assert len(graded.rollouts) == 8


def test_an_interrupted_call_leaves_nothing_to_the_next(toy):
    def interrupt():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with GraderPool(toy, timeout_s=600.0) as pool:
        pool.wait_ready()
        timer = threading.Timer(0.2, interrupt)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.grade(pairs("ok 1", "sleep", "ok 2"))
        timer.join()
        graded = pool.grade(pairs("ok 3", "ok 4"))
    assert [rollout.reward for rollout in graded.rollouts] == [3.0, 4.0]


# ------------------------------------------------------------------------------ end of processes


@pytest.mark.slow
def test_closing_leaves_no_process_not_even_a_zombie(toy):
    pool = GraderPool(toy, workers=3, timeout_s=1.0)
    pool.grade(pairs("ok 1", "die", "ok 2", "sleep"))
    pids = pool.pids
    assert len(pids) == 3
    pool.close()
    assert all(is_gone(pid) for pid in pids)
    pool.close()


def test_closing_does_not_wait_for_graders_that_are_starting(tmp_path, monkeypatch):
    (tmp_path / "sleepy.py").write_text("import time; time.sleep(3600)")
    monkeypatch.syspath_prepend(tmp_path)
    pool = GraderPool("sleepy:f", workers=2)
    pids = pool.pids
    pool.close()
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.slow
def test_processes_that_a_reward_started_end_with_its_grader(toy, tmp_path):
    pid_file = tmp_path / "pid"
    with GraderPool(toy, timeout_s=1.0) as pool:
        (failure,) = pool.grade([pair("child", pid_file=str(pid_file))]).failures
    assert "gave no result" in failure.error
    # the orphan is killed at once, and reaped by init later
    wait_until(lambda: is_zombie(int(pid_file.read_text())))


@pytest.mark.slow
def test_graders_end_when_their_parent_is_killed(tmp_path):
    program = (
        "from longtail.rl.grading.pool import GraderPool; import time\n"
        "pool = GraderPool('exact', workers=2); pool.wait_ready()\n"
        "print(*pool.pids, flush=True); time.sleep(3600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    wait_until(lambda: all(is_zombie(pid) for pid in pids))


# ------------------------------------------------------------------------------ failed starts


def test_an_unknown_reward_is_refused_before_any_process_starts():
    with pytest.raises(ConfigError, match="unknown, did you mean 'exact'"):
        GraderPool("exakt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def other(**columns): ...", "has no 'f'"),
        ("import no_such_package", "does not import .*no_such_package"),
        ("raise RuntimeError('no licence')", r"reward\.name = 'bad_start:f'.*no licence"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
        ("import os; os._exit(7)", "exited with status 7 before it had loaded the reward"),
        ("import time; time.sleep(3600)", "no result in 1.5 s and was killed before it had loaded"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_a_config_error(tmp_path, monkeypatch, source, why):
    (tmp_path / "bad_start.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with GraderPool("bad_start:f", start_timeout_s=1.5) as pool:
        pids = pool.pids
        with pytest.raises(ConfigError, match=why):
            pool.wait_ready()
    assert all(is_gone(pid) for pid in pids)


def test_graders_that_can_no_longer_start_end_the_run_with_a_reason(tmp_path, monkeypatch):
    flag = tmp_path / "used"
    (tmp_path / "once.py").write_text(
        f"import os\nif os.path.exists({str(flag)!r}): raise RuntimeError('disk gone')\n"
        f"open({str(flag)!r}, 'w').close()\n"
        "def f(**columns): os._exit(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with (
        GraderPool("once:f") as pool,
        pytest.raises(GradingError, match=r"disk gone.*the last of 3 that did not start"),
    ):
        pool.grade(pairs("a", "b"))
