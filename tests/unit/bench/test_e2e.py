"""`longtail bench e2e`: its arms, its ratios and its card."""

import json
from pathlib import Path

import pytest

from end_to_end.workshop import Workshop, build, save_untaught, say
from longtail.assembly import memory
from longtail.assembly.plan import plan_run
from longtail.bench import e2e_card as card
from longtail.bench.arms import ArmResult, Comparison, differing_share, make_comparison
from longtail.bench.e2e import check_memory
from longtail.bench.options import ARMS, E2eBenchOptions
from longtail.config import files as configfile
from longtail.config import rl as config
from longtail.errors import ConfigError
from longtail.rl.streaming import streams


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
    "spot": arm([2.0, 2.0, 2.0], 2.0, a="one", b="three"),
}


def test_ratios_are_taken_step_by_step():
    found = card.as_json(COMPARED, FOUND)
    assert found["rollout_speedup"]["spot"] == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert found["step_speedup"]["spot"] == {"median": 2.0, "low": 1.5, "high": 2.5}
    assert found["differing_share"] == {"spot": 0.5}
    assert found["rewards_agree"] is True
    assert (found["model"], found["workers"], found["steps"]) == ("small", 2, 3)
    assert found["idle_utilization"] == {"spot": 0.5}
    assert found["spot_stop_latency_s"]["spot"] == [0.0, 0.1, 0.2]
    assert found["unnamed_share"] == {"off": 0.5 / 8.0, "spot": 0.5 / 4.0}
    assert found["accept_length"]["spot"] == [3.0, 4.0, 5.0]
    assert found["idle_share"]["off"] == 0.5
    json.dumps(found)


def test_a_differing_reward_is_reported_and_only_texts_of_both_arms_are_compared():
    other = arm([2.0, 2.0, 2.0], 2.0)
    other.metrics[1]["reward/mean"] = 0.25
    assert not card.as_json(COMPARED, {**FOUND, "spot": other})["rewards_agree"]
    assert differing_share(arm([], 0.0, a="x", b="y"), arm([], 0.0, b="y", c="z")) == 0.0
    assert differing_share(arm([], 0.0), arm([], 0.0)) == 0.0
    assert card.sentences(FOUND)[-1].startswith("NOTE: up to 50.00% of the texts differ")


# ---- what a user would gain


def shares(spot: float | None = None, cold: list[float] | None = None) -> list[str]:
    """Return the card's sentences for arms whose steps take these shares of ten seconds."""
    found = {"off": arm([10.0] * 6, 0.0)}
    if spot is not None:
        found["spot"] = arm([10.0 * spot] * 6, 0.0)
    if cold is not None:
        found["cold"] = arm([10.0 * share for share in cold], 0.0)
    return card.sentences(found)


DRAFTED = "With a drafter that learns while you train, a step of this run took "


@pytest.mark.parametrize(
    ("spot", "cold", "sentence"),
    [
        (0.71, None, DRAFTED + "0.71x of the time (trained before: a gain)."),
        (1.01, None, DRAFTED + "1.01x of the time (trained before: no gain)."),
        (1.2, None, DRAFTED + "1.20x of the time (trained before: a loss)."),
        (
            0.5,
            [1.1, 1.1, 1.0, 0.9, 0.8, 0.8],
            DRAFTED + "0.50x of the time (trained before: a gain), and 0.95x of the time (fresh at "
            "its start: a gain; in the last 3 steps 0.80x: a gain).",
        ),
    ],
)
def test_the_first_sentence_is_honest_about_a_gain_nothing_and_a_loss(spot, cold, sentence):
    assert shares(spot, cold) == [sentence, "All arms wrote the same texts."]
    assert shares() == ["All arms wrote the same texts."]
    most = {"off": arm([10.0] * 6, 0.0), "spot": arm([9.0] * 6, 0.0), "all": arm([5.0] * 6, 0.0)}
    assert card.sentences(most)[0] == (
        DRAFTED + "0.50x of the time (idle workers at work: a gain)."
    )
    few = {"off": arm([10.0] * 2, 0.0), "spot": arm([5.0] * 2, 0.0)}
    assert "0.50x of the time (trained before: too few steps to tell)" in card.sentences(few)[0]


# ---- the arms of a run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--arms off,warm", "--arms[1] = warm: it must be 'off', 'frozen'"),
        ("--arms spot,off", "--arms = 'spot,off': off comes first"),
        ("--arms off", "--arms = 'off': off comes first; name another"),
        ("--arms off,spot,spot", "name each arm once"),
        ("--steps 0", "--steps = 0: it must be greater"),
    ],
)
def test_an_impossible_option_is_refused_by_name(words, message):
    said = say("bench", "e2e", *words.split())
    assert said.code == 2
    assert message in said.err


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return build(tmp_path_factory.mktemp("e2e"))


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
    arms = compared(workshop, drafter="none", overrides=words).arms
    single = arms["single"]
    assert tuple(arms) == ("off", "single", "all")
    assert switches(single) == switches(arms["off"])
    assert (single.cluster.workers, single.run.threads, single.rollout.max_running) == (1, 2, 16)


def test_arms_have_the_configuration_of_the_run(workshop):
    drafter = save_untaught(workshop.model, workshop.path / "drafter")
    words = ("--run.writers=wandb",)
    given = {"arms": ARMS, "drafter": str(drafter), "overrides": ("--run.seed=7",)}
    plan = compared(workshop, *words, **given)
    assert tuple(plan.arms) == ARMS
    own = str(drafter)
    assert {name: switches(each) for name, each in plan.arms.items()} == {
        "off": ("none", "never", False),
        "frozen": (own, "never", False),
        "spot": (own, "spot", False),
        "cold": ("fresh+history+phrases", "spot", False),
        "all": (own, "spot", True),
    }
    (common,) = {
        own.model_copy(
            update={
                "speculation": config.SpeculationSection(),
                "spot": config.SpotSection(),
                "learner": own.learner.model_copy(update={"streaming": None}),
                "run": own.run.model_copy(update={"dir": "x"}),
            }
        ).model_dump_json()
        for own in plan.arms.values()
    }
    assert plan.arms["off"].run.seed == 7
    assert plan.arms["off"].run.writers == ()
    assert '"heldout_size":4' in common
    assert (plan.arms["off"].model.path, plan.steps) == (str(workshop.model), 3)


def test_a_run_without_a_trained_drafter_begins_with_a_fresh_one(workshop):
    plan = compared(workshop)
    assert switches(plan.arms["all"]) == ("fresh+history+phrases", "spot", True)
    with pytest.raises(ConfigError, match=r"--arms = off,spot: spot needs a trained .* --drafter"):
        compared(workshop, arms=("off", "spot"))


def test_a_mistyped_drafter_and_a_run_that_never_drafts_are_refused(workshop):
    with pytest.raises(ConfigError, match=r"speculation.drafter = 'no/where': it is neither"):
        compared(workshop, drafter="no/where+history")
    with pytest.raises(ConfigError, match=r"speculation.tuner = 'off': no arm would draft"):
        compared(workshop, "--speculation.tuner=off")


# ---- the run of all arms


def test_arms_that_do_not_fit_into_memory_together_are_refused(workshop, monkeypatch):
    own, many = (
        compared(workshop, overrides=(f"--rollout.max_running={n}",)).arms["off"] for n in (16, 64)
    )
    plan = Comparison(arms=dict.fromkeys(("off", "all"), many), steps=1)
    parts = memory.estimate(plan_run(own, workshop.model))  # a step has 16 requests
    # Activations and gradients are those of one arm at a time.
    both = 2 * sum(parts.values()) - sum(parts[name] for name in memory.PASSING)
    for free in (both, None):
        monkeypatch.setattr(memory, "available_bytes", lambda device, free=free: free)
        check_memory(plan)
    monkeypatch.setattr(memory, "available_bytes", lambda device: both - 1)
    with pytest.raises(ConfigError, match=r"--arms = off,all: together they need up to .* GB"):
        check_memory(plan)


def test_the_command_measures_a_run_and_ends_with_json(workshop, tmp_path):
    path, words = run_file(workshop), ("--steps", "1", "--rollout.max_tokens", "8")
    plot = tmp_path / "step.png"
    said = say("bench", "e2e", str(path), "--arms=off,all", f"--plot={plot}", *words)
    assert said.code == 0, said.err
    assert said.out.startswith("With a drafter that learns while you train, a step of this run")
    assert "All arms wrote the same texts." in said.out
    found = json.loads(said.out.splitlines()[-1])
    assert (found["model"], found["steps"], found["workers"]) == (str(workshop.model), 1, 1)
    assert found["differing_share"] == {"all": 0.0}
    assert (found["rewards_agree"], found["policies_agree"]) == (True, True)
    assert plot.read_bytes().startswith(b"\x89PNG")
