"""The main job at toy size, through the command line: what it learns and what it leaves behind."""

import json
import math
from pathlib import Path

import pytest

from end_to_end.workshop import PLAIN, Workshop, build, say
from longtail.assembly import precision
from longtail.config.rl import load
from longtail.system.device import DTYPES

STEPS = 3
DONE = (f"--run.steps={STEPS}", "--run.checkpoint_every=1")
HELDOUT, SAMPLES, ANSWERED = 4, 2, 16  # problems, completions of each; completions of a step


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Holds one finished run, `done`; `done.out` and `done.err` are what it said."""
    workshop = build(tmp_path_factory.mktemp("workshop"), PLAIN)
    said = workshop.train("done", *DONE)
    assert said.code == 0, said.err
    (workshop.path / "done.out").write_text(said.out)
    (workshop.path / "done.err").write_text(said.err)
    return workshop


@pytest.mark.slow
def test_the_reward_rises(workshop):
    """By ratios of tokens; test_law10_sums.py has the gradients of all losses."""
    words = ("--run.steps=7", "--run.seed=1", "--rollout.group_size=8")
    assert workshop.train("grpo", *words).code == 0
    # About 1/100 to begin with: each of 105 tokens is about as likely as any other.
    first, *_, last = (row["reward/mean"] for row in workshop.metrics("grpo"))
    assert first < 0.05
    assert last > 0.2
    summary = workshop.summary("grpo")
    assert summary["reward_before"] < 0.05
    assert summary["reward_after"] > 0.2
    for row in workshop.metrics("grpo"):
        assert all(math.isfinite(value) for value in row.values()), row
        assert row["reward/failures"] == 0
        # float32 in both, summed in another order: about 1e-7 of logits near 10
        assert 0 < row["training/rollout_logprob_gap_mean"] < 1e-5
        assert row["training/rollout_logprob_gap_max"] < 1e-4


def test_a_reward_function_may_rank_the_completions_of_a_prompt(workshop):
    words = ("--reward.name=end_to_end.rewards:ranked", "--reward.per=group", "--run.steps=1")
    assert workshop.train("ranked", *words).code == 0
    rewards = [row["reward"] for row in workshop.rollouts("ranked")]
    groups = [rewards[begin : begin + 4] for begin in range(0, ANSWERED, 4)]
    assert [sorted(group) for group in groups] == [[0.0, 1.0, 2.0, 3.0]] * 4
    assert workshop.metrics("ranked")[0]["reward/informative_groups"] == 1.0


def test_the_metrics_of_a_step_are_those_of_its_rollouts(workshop):
    for row in workshop.metrics("done"):
        own = [line for line in workshop.rollouts("done") if line["step"] == row["step"]]
        rewards = [line["text"].count("7") / max(len(line["text"]), 1) for line in own]
        assert [line["reward"] for line in own] == rewards
        assert len(own) == ANSWERED
        assert row["reward/mean"] == pytest.approx(sum(rewards) / ANSWERED)
        lengths = sorted(line["num_tokens"] for line in own)
        assert row["response_length/mean"] == pytest.approx(sum(lengths) / ANSWERED)
        assert row["response_length/p50"] == lengths[ANSWERED // 2 - 1]
        assert row["response_length/p99"] == row["response_length/max"] == lengths[-1]
        assert row["rollout/generated_tokens"] == sum(lengths)
        assert {line["policy_version"] for line in own} == {row["step"] - 1}


def test_auto_is_decided_before_the_first_step_and_a_cost_is_said(workshop, monkeypatch):
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda device: False)
    words = ("--run.steps=1", "--rollout.dtype=auto", "--data.heldout_size=0")
    said = workshop.train("auto", *words, "--learner.autocast=auto")
    assert said.code == 0
    assert "emulated" not in said.err
    config = load(workshop.path / "auto" / "config.toml")
    assert config.rollout.dtype in DTYPES
    assert config.learner.autocast is False
    said = workshop.train("emulated", *words, "--learner.autocast=true")
    assert said.code == 0
    assert said.err.count("learner.autocast = true: bfloat16 is emulated") == 1


def test_the_summary_is_shown_again_and_nothing_is_done_when_all_steps_are(workshop):
    before = _files(workshop.path / "done")
    said = workshop.train("done", *DONE)
    assert said.code == 0
    assert (
        said.err == f"{workshop.path / 'done'}: its 3 steps are done; raise run.steps to continue\n"
    )
    assert f"{workshop.summary('done')['reward_after']:.3f} after 3 steps" in said.out
    assert str(workshop.policy("done", STEPS)) in said.out
    assert _files(workshop.path / "done") == before


def _files(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_a_lost_summary_is_made_again(workshop):
    file = workshop.path / "done" / "summary.json"
    lost = json.loads(file.read_text())
    file.write_text('{"reward_before"')
    assert workshop.train("done", *DONE).code == 0
    clocked = ("seconds", "limit")
    assert {**workshop.summary("done"), **dict.fromkeys(clocked)} == {
        **lost,
        **dict.fromkeys(clocked),
    }


@pytest.mark.slow
def test_an_evaluation_on_the_way_is_that_of_a_run_that_ended_there(workshop):
    words = ("--rollout.max_tokens=8", "--run.seed=1")
    assert workshop.train("short", *words, "--run.steps=4").code == 0
    assert workshop.train("long", *words, "--run.steps=5", "--eval.every=2").code == 0
    evaluated = {
        row["step"]: row["eval/reward_mean"]
        for row in workshop.metrics("long")
        if "eval/reward_mean" in row
    }
    # Each is logged with the step that begins with the evaluated policy.
    assert evaluated.keys() == {1, 3, 5}
    assert evaluated[5] == workshop.summary("short")["reward_after"] > evaluated[1]


def test_held_out_problems_are_never_trained_on(workshop):
    # 12 prompts, the last 4 held out, 3 steps of 4: the other 8 are visited, some of them twice
    trained = {line["prompt_id"] for line in workshop.rollouts("done")}
    assert trained == {f"prompts/{index}" for index in range(8)}


def test_progress_goes_to_stderr_one_line_a_step_and_the_summary_to_stdout(workshop):
    lines = (workshop.path / "done.err").read_text().splitlines()
    assert len(lines) == 4 + STEPS
    assert "29,920 parameters, grpo, 1 x 1 threads" in lines[0]
    assert lines[1].startswith("first text: ")
    assert [line[:8] for line in lines[3:6]] == ["step 1/3", "step 2/3", "step 3/3"]
    assert "rollout" in lines[3]
    assert lines[6].startswith("held-out reward after step 3: ")
    assert f"({HELDOUT} problems x {SAMPLES})" in lines[6]
    assert "held-out reward" in (workshop.path / "done.out").read_text()


def test_a_run_can_be_asked_for_completions(workshop):
    words = ["generate", str(workshop.path / "done"), "--prompt", "say 3", "--max-tokens=12"]
    words += ["--threads=1", "--seed=3"]
    streamed = say(*words)
    assert streamed.code == 0
    assert "tokens/s; finished by" in streamed.err
    first, second = map(json.loads, say(*words, "--json", "--n=2").out.splitlines())
    assert streamed.out == first["text"] + "\n" != second["text"] + "\n"
    assert (first["num_tokens"] <= 12, first["logprob"] < 0) == (True, True)
    newest = say(*words[:1], str(workshop.policy("done", STEPS)), *words[2:])
    assert newest.out == streamed.out
    initial = say(*words[:1], str(workshop.model), *words[2:])
    assert initial.out != streamed.out
