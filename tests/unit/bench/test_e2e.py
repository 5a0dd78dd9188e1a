"""`longtail bench e2e`: its arms, its ratios and its card."""

import json
from pathlib import Path

import pytest
import torch

from end_to_end.workshop import Workshop, build, save_untaught, say
from longtail.assembly import memory
from longtail.assembly.plan import plan_run
from longtail.bench.e2e import card
from longtail.bench.e2e.arms import ArmResult, Plan, differing_share, make_plan
from longtail.bench.e2e.run import must_park, run_arms
from longtail.bench.options import ARMS, E2eBenchOptions
from longtail.config import files as configfile
from longtail.config import rl as config
from longtail.errors import ConfigError
from longtail.rl.streaming import streams
from longtail.system import memory as parking


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
            "cluster/stolen_s": 0.25,
            "cluster/moved_requests": 2.0,
            "speculation/accept_length": 3.0 + index,
        }
        for index, rollout in enumerate(rollouts)
    ]
    return ArmResult(metrics=rows, texts=texts)


PLAN = Plan(
    arms={"off": config.load(None, ["--model.path=small", "--cluster.workers=2"])},
    steps=3,
    notes=(),
)
FOUND = {
    "off": arm([8.0, 4.0, 6.0], 2.0, a="one", b="two"),
    "spot": arm([2.0, 2.0, 2.0], 2.0, a="one", b="three"),
}


def test_ratios_are_taken_step_by_step() -> None:
    found = card.as_json(PLAN, FOUND)
    assert found["rollout_speedup"]["spot"] == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert found["step_speedup"]["spot"] == {"median": 2.0, "low": 1.5, "high": 2.5}
    assert found["differing_share"] == {"spot": 0.5}
    assert found["rewards_agree"] is True
    assert (found["model"], found["workers"], found["steps"]) == ("small", 2, 3)
    assert found["idle_utilization"] == {"spot": 0.5}
    assert found["spot_stop_latency_s"]["spot"] == [0.0, 0.1, 0.2]
    assert found["stolen_s"]["off"] == [0.25] * 3
    assert found["unnamed_share"] == {"off": 0.5 / 8.0, "spot": 0.5 / 4.0}
    assert found["accept_length"]["spot"] == [3.0, 4.0, 5.0]
    assert found["idle_share"]["off"] == 0.5
    json.dumps(found)


def test_a_differing_reward_is_reported_and_only_texts_of_both_arms_are_compared() -> None:
    other = arm([2.0, 2.0, 2.0], 2.0)
    other.metrics[1]["reward/mean"] = 0.25
    assert not card.as_json(PLAN, {**FOUND, "spot": other})["rewards_agree"]
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
def test_the_first_sentence_is_honest_about_a_gain_nothing_and_a_loss(
    spot: float, cold: list[float] | None, sentence: str
) -> None:
    assert shares(spot, cold) == [sentence, "All arms wrote the same texts."]
    assert shares() == ["All arms wrote the same texts."]
    most = {"off": arm([10.0] * 6, 0.0), "spot": arm([9.0] * 6, 0.0), "all": arm([5.0] * 6, 0.0)}
    assert card.sentences(most)[0] == (
        DRAFTED + "0.50x of the time (idle workers at work: a gain)."
    )
    few = {"off": arm([10.0] * 2, 0.0), "spot": arm([5.0] * 2, 0.0)}
    assert "0.50x of the time (trained before: too few steps to tell)" in card.sentences(few)[0]


# ---- the arms of a run


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return build(tmp_path_factory.mktemp("e2e"))


def run_file(workshop: Workshop, *words: str) -> Path:
    """Write a run's configuration."""
    own = config.load(None, workshop.words("own", "--run.steps=3", *words)[1:])
    path = workshop.path / "run.toml"
    path.write_text(configfile.render(own))
    return path


def plan_of(workshop: Workshop, *words: str, **options: object) -> Plan:
    path = run_file(workshop, *words)
    return make_plan(E2eBenchOptions(run=str(path), **options), workshop.path / "arms")


def switches(own: config.RunConfig) -> tuple[str, str, bool, bool]:
    return own.speculation.drafter, own.spot.train, streams(own.learner), own.rollout.sharing


def test_one_plain_worker_with_all_threads_is_measured_beside_several(workshop: Workshop) -> None:
    words = ("--cluster.workers=2", "--run.threads=1", "--rollout.max_running=8")
    plan = plan_of(workshop, drafter="none", overrides=words)
    single = plan.arms["single"]
    assert tuple(plan.arms)[:2] == ("off", "single")
    assert switches(single) == switches(plan.arms["off"])
    assert (single.cluster.workers, single.run.threads, single.rollout.max_running) == (1, 2, 16)


def test_arms_have_the_configuration_of_the_run(workshop: Workshop) -> None:
    drafter = save_untaught(workshop.model, workshop.path / "drafter")
    words = ("--run.writers=wandb",)
    plan = plan_of(workshop, *words, drafter=str(drafter), overrides=("--run.seed=7",))
    assert tuple(plan.arms) == ARMS
    own = str(drafter)
    assert {name: switches(each) for name, each in plan.arms.items()} == {
        "off": ("none", "never", False, False),
        "history": ("history+phrases", "never", False, False),
        "frozen": (own, "never", False, False),
        "spot": (own, "spot", False, False),
        "cold": ("fresh+history+phrases", "spot", False, False),
        "stream": (own, "spot", True, False),
        "share": (own, "spot", False, True),
        "all": (own, "spot", True, True),
    }
    (common,) = {
        own.model_copy(
            update={
                "speculation": config.SpeculationSection(),
                "spot": config.SpotSection(),
                "learner": own.learner.model_copy(update={"streaming": None}),
                "rollout": own.rollout.model_copy(update={"sharing": True}),
                "run": own.run.model_copy(update={"dir": "x"}),
            }
        ).model_dump_json()
        for own in plan.arms.values()
    }
    assert plan.arms["off"].run.seed == 7
    assert plan.arms["off"].run.writers == ()
    assert '"heldout_size":4' in common
    assert (plan.arms["off"].model.path, plan.steps) == (str(workshop.model), 3)


def test_a_run_without_a_trained_drafter_leaves_arms_out_and_says_how_to_get_one(
    workshop: Workshop,
) -> None:
    plan = plan_of(workshop)
    assert list(plan.arms) == ["off", "history", "cold", "stream", "share", "all"]
    assert switches(plan.arms["all"]) == ("fresh+history+phrases", "spot", True, True)
    (note,) = plan.notes
    assert note.startswith("left out: frozen, spot: ")
    assert "give --drafter DIR" in note
    with pytest.raises(ConfigError, match="--arms = off,spot; left out: spot"):
        plan_of(workshop, arms=("off", "spot"))


def test_a_mistyped_drafter_and_a_run_that_never_drafts_are_refused(workshop: Workshop) -> None:
    with pytest.raises(ConfigError, match=r"speculation.drafter = 'no/where': it is neither"):
        plan_of(workshop, drafter="no/where+history")
    with pytest.raises(ConfigError, match=r"speculation.tuner = 'off': no arm would draft"):
        plan_of(workshop, "--speculation.tuner=off")


# ---- parked and resident


def outcome(found: dict[str, ArmResult]) -> dict[str, object]:
    """Everything of the arms that must not depend on parking."""
    return {
        name: (each.texts, each.column("reward/mean"), each.column("actor/grad_norm"), each.policy)
        for name, each in found.items()
    }


@pytest.mark.slow
def test_parked_arms_make_the_same_run_as_resident_ones(workshop: Workshop) -> None:
    drafter = save_untaught(workshop.model, workshop.path / "drafter")
    words = ("--learner.mini_batches=2", "--rollout.max_tokens=8")
    plan = plan_of(workshop, *words, arms=("off", "frozen"), drafter=str(drafter), steps=2)
    resident = run_arms(plan, print, is_parked=False)
    parked = run_arms(plan, print, is_parked=True)
    assert outcome(parked) == outcome(resident)
    assert len(resident["off"].texts) == 2 * 16
    assert resident["off"].policy == resident["frozen"].policy != ""


def test_parked_tensors_have_no_memory_and_come_back_with_their_bits(tmp_path: Path) -> None:
    tensors = [torch.nn.Parameter(torch.randn(3, 5)), torch.randn(7).bfloat16(), torch.zeros(0, 2)]
    before = [each.detach().clone() for each in tensors]
    parking.write(tensors, tmp_path / "parked")
    parking.release(tensors)
    assert [each.shape for each in tensors] == [each.shape for each in before]
    assert sum(each.untyped_storage().nbytes() for each in tensors) <= 4 * len(tensors)
    parking.read(tensors, tmp_path / "parked")
    assert all(torch.equal(a.detach(), b) for a, b in zip(tensors, before, strict=True))
    assert tensors[0].is_contiguous()


def test_arms_are_parked_if_all_may_need_more_than_is_free(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(workshop, arms=("off", "history"))
    parts = memory.estimate(plan_run(plan.arms["off"], workshop.model))
    # Activations and gradients are those of one arm at a time.
    both = 2 * sum(parts.values()) - sum(parts[name] for name in memory.PASSING)
    for free, expected in ((both, False), (both - 1, True), (None, False)):
        monkeypatch.setattr(memory, "available_bytes", lambda device, free=free: free)
        assert must_park(plan) is expected


def test_the_command_measures_a_run_and_ends_with_json(workshop: Workshop, tmp_path: Path) -> None:
    path, words = run_file(workshop), ("--steps", "1", "--rollout.max_tokens", "8")
    plot = tmp_path / "step.png"
    said = say("bench", "e2e", str(path), "--arms=off,all", f"--plot={plot}", *words)
    assert said.code == 0, said.err
    assert said.out.startswith("With a drafter that learns while you train, a step of this run")
    assert "All arms wrote the same texts." in said.out
    found = json.loads(said.out.splitlines()[-1])
    assert (found["model"], found["steps"], found["workers"]) == (str(workshop.model), 1, 1)
    assert found["differing_share"] == {"all": 0.0}
    assert (found["rewards_agree"], found["policies_agree"], found["parked"]) == (True, True, False)
    assert plot.read_bytes().startswith(b"\x89PNG")
