"""A short chaos run, and the harness of the long one: it sees what goes wrong."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from chaos import sitting
from chaos.campaign import exact_dtypes, summary, table
from chaos.diary import ANEW, DRIVER, Reader, lengths, note
from chaos.plan import BLOWS, Strike, plans
from chaos.reference import Reference, differing, undisturbed
from chaos.sitting import Failure, Sitting, leftovers
from chaos.trial import Kill, Outcome, Trial, share_lost_seconds
from end_to_end.workshop import build, save_untaught, write_lines

pytest.importorskip("ray")

PATIENCE_S = 150.0
STRIKES = (
    Strike("learning", skips=1, moment=0.0),
    Strike("generating", skips=1, moment=0.0),
    Strike(ANEW, victim="the driver", moment=0.0),
)
"""A worker as it learns, one as it generates, and the driver while a successor starts."""


@pytest.mark.slow
def test_a_run_whose_workers_and_driver_are_killed_writes_what_it_would_have(tmp_path: Path):
    if "float32" not in exact_dtypes():
        pytest.skip("no native kernels: a text may depend on its batch")
    workshop = build(tmp_path)
    drafter = save_untaught(workshop.model, tmp_path / "drafter")
    words = workshop.words(
        "unused",
        *("--run.steps=4", "--run.checkpoint_every=1", "--learner.dtype=float64"),
        *("--rollout.prompts_per_step=3", "--rollout.max_running=2", "--rollout.max_tokens=150"),
        f"--speculation.drafter={drafter}",
    )
    # One worker, which needs no Ray. Its float64 sums are those of two as far as texts can tell.
    alone = undisturbed(words, tmp_path / "undisturbed", patience_s=PATIENCE_S)
    reference = replace(alone, weights=None)
    rewards = {rollout[1] for rollout in reference.rollouts.values()}
    assert len(rewards) > 1, "without a gradient all policies are alike"
    words += ["--cluster.workers=2", "--cluster.hang_s=30", "--run.threads=2"]
    trial = Trial(
        *(words, STRIKES, reference, tmp_path / "struck"),
        patience_s=PATIENCE_S,
        resumed=["--cluster.workers=1", "--run.threads=1"],  # a checkpoint suits any number
    )
    outcome = trial.run()
    assert not outcome.failure, outcome.failure
    assert [kill.who == DRIVER for kill in outcome.kills] == [False, False, True]
    assert [kill.recovery for kill in outcome.kills] == ["in place", *2 * ["by resuming"]]
    assert outcome.num_rollouts == 4 * 3 * 4


NOTHING = Reference(rollouts={}, weights=None, milestones={}, lengths={}, seconds=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "patience_s", "failure"),
    [
        ("import time; time.sleep(600)", 0.2, "hang: nothing happened for 0 s"),
        ("raise SystemExit('out of luck')", 60.0, "the run ended with code 1: out of luck"),
    ],
)
def test_a_run_that_hangs_or_ends_by_itself_fails(
    tmp_path: Path, monkeypatch, program: str, patience_s: float, failure: str
):
    monkeypatch.setattr(sitting, "_PROGRAM", program)
    trial = Trial([], [], NOTHING, tmp_path / "run", patience_s=patience_s)
    assert trial.run().failure.startswith(failure)


def test_a_process_that_outlives_its_driver_is_found_and_ended(tmp_path: Path, monkeypatch):
    program = "import subprocess, sys; subprocess.Popen(['sleep', '600'])"
    monkeypatch.setattr(sitting, "_PROGRAM", program)
    monkeypatch.setattr(sitting, "_LEFTOVER_S", 0.1)
    process = Sitting([], tmp_path / "run" / "sitting-0", patience_s=60.0)
    assert not process.wait_until(lambda: False)
    assert leftovers(tmp_path / "run") == ["sleep 600"]
    monkeypatch.setattr(sitting, "_LEFTOVER_S", 60.0)
    assert leftovers(tmp_path / "run") == []


def test_a_rollout_that_differs_or_is_there_twice_is_seen(tmp_path: Path):
    row = {"step": 1, "request_id": "a", "text": "7", "reward": 1.0, "policy_version": 0}
    row["logprob"] = -0.5
    reference = replace(NOTHING, rollouts={(1, "a"): ("7", 1.0, 0, -0.5)})
    log = tmp_path / "rollouts.jsonl"
    write_lines(log, row)
    assert differing(tmp_path, reference) == []
    write_lines(log, row | {"text": "8"})
    assert differing(tmp_path, reference) == [(1, "a")]
    write_lines(log)
    assert differing(tmp_path, reference) == [(1, "a")]
    write_lines(log, row, row)
    with pytest.raises(Failure, match="1 rollouts are logged twice"):
        differing(tmp_path, reference)


def test_kills_share_the_time_that_was_lost_before_the_next_one():
    kills = [Kill(0, "idle", 10.0), Kill(1, "learning", 11.0), Kill(DRIVER, "rollout", 30.0)]
    outcome = Outcome(kills=kills)
    share_lost_seconds(outcome, [(5.0, 0.5), (20.0, 8.5), (25.0, 9.0), (60.0, 29.0)])
    assert [kill.lost_s for kill in kills] == [4.25, 4.25, 20.0]


def test_a_diary_tells_the_activity_of_each_actor(tmp_path: Path):
    path = tmp_path / "diary"
    reader = Reader(path)
    assert reader.read() == 0
    note(path, 0, pid=71)
    note(path, 0, state="idle")
    note(path, 0, state="learning")
    note(path, 0, task="publish")
    with path.open("a") as file:
        file.write('{"at": 5')  # being written
    assert reader.read() == 4
    assert reader.workers[0].activity == "publishing weights"
    assert list(lengths(reader.entered)) == ["starting", "idle"]
    path.write_bytes(path.read_bytes().removesuffix(b'{"at": 5'))
    note(path, 0, state="dead")
    note(path, 0, state="starting")
    assert reader.read() == 2
    assert (reader.workers[0].activity, reader.workers[0].pid) == (ANEW, 0)


def test_plans_follow_from_the_seed_and_every_blow_has_its_turn():
    def dealt(seed: int) -> list:
        return list(islice(plans(seed, ["float32"], [2], blows=3), len(BLOWS)))

    assert dealt(3) == dealt(3)
    assert dealt(3) != dealt(4)
    awaited = {(strike.awaited, strike.of_driver) for plan in dealt(3) for strike in plan.strikes}
    assert awaited == {(each.awaited, each.of_driver) for blow in BLOWS for each in blow}


def test_a_campaign_adds_up_its_trials():
    plan = next(plans(0, ["float32"], [2], blows=1))
    good = Outcome(kills=[Kill(0, "idle", 1.0, "in place", 3.0)], num_rollouts=64)
    bad = Outcome(kills=[Kill(DRIVER, "rollout", 2.0)], failure="hang")
    found = summary([(plan, good), (plan, bad)], 0, 1.0)
    assert found["kills_by_state"] == {"driver: rollout": 1, "idle": 1}
    assert found["recoveries"] == {"in place": 1}
    assert found["seconds_lost"]["worker"] == {"median": 3.0, "worst": 3.0}
    assert [failure["what"] for failure in found["failures"]] == ["hang"]
    json.dumps(found)
    assert "idle" in table([*good.kills, *bad.kills])
