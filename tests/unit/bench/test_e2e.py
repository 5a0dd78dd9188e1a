"""`longtail bench e2e`: its arms, its ratios and its card."""

import json
from pathlib import Path

import pytest

from end_to_end.workshop import Workshop, say
from longtail.assembly import memory_bound
from longtail.assembly.plan import plan_run
from longtail.bench import e2e_card as card
from longtail.bench.arms import ArmResult, Comparison, differing_share, make_comparison
from longtail.bench.e2e import check_memory
from longtail.config import files as configfile
from longtail.config import rl as config
from longtail.config.command_options import E2eBenchOptions
from longtail.errors import ConfigError
from longtail.rl.group_stream import streams


def arm(rollouts: list[float], others: float, **texts: str) -> ArmResult:
    """Steps of the given seconds of rollout, and `others` seconds of everything else."""
    rows = [
        {
            "timing_s/rollout": rollout,
            "timing_s/learn": 0.75 * others,
            "timing_s/step": rollout + others,
            "reward/mean": 0.5,
            "cluster/generating_s": rollout,
            "cluster/idle_s": rollout / 2,
            "cluster/spot_s": rollout / 2,
            "cluster/idle_utilization": 0.5,
            "cluster/spot_stop_latency_s": 0.1 * index,
            "cluster/learning_ahead_s": 0.0,
            "speculation/accept_length": 3.0 + index,
        }
        for index, rollout in enumerate(rollouts)
    ]
    return ArmResult(metrics=rows, texts=texts)


COMPARED = Comparison(
    arms={"off": config.load(None, ["--model.path=small", "--cluster.workers=2"])}, steps=3
)
FOUND = {
    "off": arm([8.0, 4.0, 6.0], 2.0, a="one", b="two"),
    "on": arm([2.0, 2.0, 2.0], 2.0, a="one", b="three"),
}


def test_ratios_are_taken_step_by_step():
    found = card.as_json(COMPARED, FOUND)
    assert found["rollout_speedup"]["on"] == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert found["step_speedup"]["on"] == {"median": 2.0, "low": 1.5, "high": 2.5}
    assert found["differing_share"] == {"on": 0.5}
    assert found["rewards_agree"] is True
    assert (found["model"], found["workers"], found["steps"]) == ("small", 2, 3)
    assert found["unnamed_share"] == {"off": 0.5 / 8.0, "on": 0.5 / 4.0}
    assert found["idle_share"]["off"] == 0.5


def test_a_differing_reward_is_reported_and_only_completions_of_both_arms_are_compared():
    other = arm([2.0, 2.0, 2.0], 2.0)
    other.metrics[1]["reward/mean"] = 0.25
    assert not card.as_json(COMPARED, {**FOUND, "on": other})["rewards_agree"]
    assert differing_share(arm([], 0.0, a="x", b="y"), arm([], 0.0, b="y", c="z")) == 0.0
    assert differing_share(arm([], 0.0), arm([], 0.0)) == 0.0
    assert card.sentences(FOUND)[-1].startswith("NOTE: 50.00% of the completions differ")


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ([0.71] * 3, "0.71x of the time: a gain."),
        ([1.01] * 3, "1.01x of the time: no gain."),
        ([1.2] * 3, "1.20x of the time: a loss."),
        ([0.5] * 2, "0.50x of the time: too few steps to tell."),
        (
            [1.1, 1.1, 1.0, 0.9, 0.8, 0.8],
            "0.95x of the time: a gain; in the last 3 steps 0.80x of the time: a gain.",
        ),
    ],
)
def test_the_first_sentence_is_honest_about_a_gain_nothing_and_a_loss(shares, verdict):
    """Shares of ten seconds; the faster of the two plain arms is the baseline."""
    found = {
        "off": arm([12.0] * len(shares), 0.0),
        "single": arm([10.0] * len(shares), 0.0),
        "on": arm([10.0 * share for share in shares], 0.0),
    }
    first, second = card.sentences(found)
    assert first == f"With drafts a step of this run took {verdict}"
    assert second == "All arms wrote the same completions."


# ---- the arms of a run


def run_file(workshop: Workshop, *words: str) -> Path:
    """Write a run's configuration."""
    own = config.load(None, workshop.words("own", "--run.steps=3", *words)[1:])
    path = workshop.path / "run.toml"
    path.write_text(configfile.render(own))
    return path


def compared(workshop: Workshop, *words: str, **options: object) -> Comparison:
    path = run_file(workshop, *words)
    return make_comparison(E2eBenchOptions(run=str(path), **options), workshop.path / "arms")


def switches(own: config.RunConfig) -> tuple[str, str, bool]:
    return own.speculation.drafter, own.spot.train, streams(own.learner)


def test_one_plain_worker_with_all_threads_is_measured_beside_several(workshop):
    words = ("--cluster.workers=2", "--run.threads=1", "--rollout.max_running=8")
    arms = compared(workshop, overrides=words).arms
    single = arms["single"]
    assert tuple(arms) == ("off", "single", "on")
    assert switches(single) == switches(arms["off"])
    assert (single.cluster.workers, single.run.threads, single.rollout.max_running) == (1, 2, 16)


def test_the_arm_off_differs_from_the_run_in_drafting_and_idle_work_alone(workshop):
    words = ("--run.writers=wandb", "--speculation.drafter=history")
    plan = compared(workshop, *words, overrides=("--run.seed=7",))
    assert {name: switches(each) for name, each in plan.arms.items()} == {
        "off": ("none", "never", False),
        "on": ("history", "spot", True),
    }
    common = [
        own.model_copy(
            update={
                "speculation": config.SpeculationSection(),
                "spot": config.SpotSection(),
                "learner": own.learner.model_copy(update={"streaming": None}),
                "run": own.run.model_copy(update={"dir": "x"}),
            }
        )
        for own in plan.arms.values()
    ]
    assert common[0] == common[1]
    assert (common[0].run.seed, common[0].run.writers, plan.steps) == (7, (), 3)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--speculation.drafter=no/where+history", "drafter = 'no/where': it is neither"),
        ("--speculation.drafter=none", "drafter = 'none': no arm would draft"),
        ("--speculation.tuner=off", "tuner = 'off': no arm would draft"),
    ],
)
def test_a_mistyped_drafter_and_a_run_that_never_drafts_are_refused(workshop, word, message):
    with pytest.raises(ConfigError, match=f"speculation.{message}"):
        compared(workshop, word)


# ---- the run of all arms


def test_arms_that_do_not_fit_into_memory_together_are_refused(workshop, monkeypatch):
    own, many = (
        compared(workshop, overrides=(f"--rollout.max_running={n}",)).arms["off"] for n in (16, 64)
    )
    plan = Comparison(arms=dict.fromkeys(("off", "on"), many), steps=1)
    parts = memory_bound.estimate(plan_run(own, workshop.model))  # a step has 16 requests
    # Activations and gradients are those of one arm at a time.
    both = 2 * sum(parts.values()) - sum(parts[name] for name in memory_bound.PASSING)
    for free in (both, None):
        monkeypatch.setattr(memory_bound, "available_bytes", lambda device, free=free: free)
        check_memory(plan)
    monkeypatch.setattr(memory_bound, "available_bytes", lambda device: both - 1)
    with pytest.raises(ConfigError, match=r"the arms off, on need up to .* GB"):
        check_memory(plan)


def test_the_command_measures_a_run_and_ends_with_json(workshop):
    words = ("--steps", "1", "--rollout.max_tokens", "8")
    said = say("bench", "e2e", str(run_file(workshop)), *words)
    assert said.code == 0, said.err
    assert said.out.startswith("With drafts a step of this run took ")
    assert "All arms wrote the same completions." in said.out
    found = json.loads(said.out.splitlines()[-1])
    assert (found["model"], found["steps"], found["workers"]) == (str(workshop.model), 1, 1)
    assert found["differing_share"] == {"on": 0.0}
    assert (found["rewards_agree"], found["policies_agree"]) == (True, True)
