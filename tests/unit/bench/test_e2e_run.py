"""`longtail bench e2e RUN.toml`: the arms of a user's own run, their memory, and parking."""

import json
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from end_to_end.workshop import Workshop, build, save_untaught, say
from longtail.assembly import memory
from longtail.assembly.models import TINY_REASONER, model_directory
from longtail.bench.common.options import split_overrides
from longtail.bench.e2e import beside, room
from longtail.bench.e2e.arms import ArmResult
from longtail.bench.e2e.measure import find_room, measure, run_arms
from longtail.bench.e2e.options import E2eBenchOptions
from longtail.bench.e2e.plan import Plan, make_plan
from longtail.bench.e2e.room import ArmBytes, Room, make_room
from longtail.config import files as configfile
from longtail.config import rl as config
from longtail.errors import ConfigError
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.system import machine, parking
from support.benches import parse
from support.tiny_models import tiny_config


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return build(tmp_path_factory.mktemp("e2e"))


def run_file(workshop: Workshop, *words: str) -> Path:
    """Write a run's configuration."""
    own = config.load(None, workshop.words("own", "--run.steps=3", *words)[1:])
    path = workshop.path / "run.toml"
    path.write_text(configfile.render(own))
    return path


# ---- the command line


def test_words_of_the_configuration_are_told_from_options() -> None:
    words = ["run.toml", "--steps", "2", "--run.seed", "1", "--rollout.stop=a.b", "--arms=off,cold"]
    assert split_overrides(words) == (
        ["run.toml", "--steps", "2", "--arms=off,cold"],
        ("--run.seed", "1", "--rollout.stop=a.b"),
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.toml", "--workers", "3"], "--workers = 3: RUN says this by cluster.workers"),
        (["run.toml", "--dtype=bfloat16"], "--dtype = bfloat16: RUN says this by rollout.dtype"),
        (["run.toml", "--quick"], "--quick makes another run than RUN"),
        (["run.toml", "--switch-task=2"], "--switch-task: RUN has its own prompts"),
        (["run.toml", "--arms", "off,spot,spot"], "each arm is given once"),
    ],
)
def test_what_the_run_itself_decides_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse("e2e", *words)


def test_a_field_without_a_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--run.seed=1: it sets a field of RUN"):
        E2eBenchOptions(overrides=("--run.seed=1",))


# ---- the arms of a run


def plan_of(workshop: Workshop, *words: str, **options: object) -> Plan:
    path = run_file(workshop, *words)
    return make_plan(E2eBenchOptions(run=str(path), **options), workshop.path / "arms")


def test_arms_have_the_configuration_of_the_run(workshop: Workshop) -> None:
    drafter = save_untaught(workshop.model, workshop.path / "drafter")
    words = ("--run.writers=wandb",)
    plan = plan_of(workshop, *words, drafter=str(drafter), overrides=("--run.seed=7",))
    assert list(plan.arms) == ["off", "history", "frozen", "spot", "cold"]
    given = {name: (each.speculation.drafter, each.spot.train) for name, each in plan.arms.items()}
    assert given == {
        "off": ("none", "never"),
        "history": ("history", "never"),
        "frozen": (str(drafter), "never"),
        "spot": (str(drafter), "spot"),
        "cold": ("fresh+history", "spot"),
    }
    (common,) = {
        own.model_copy(
            update={
                "speculation": config.SpeculationSection(),
                "spot": config.SpotSection(),
                "run": own.run.model_copy(update={"dir": "x"}),
            }
        ).model_dump_json()
        for own in plan.arms.values()
    }
    assert plan.arms["off"].run.seed == 7
    assert plan.arms["off"].run.writers == ()
    assert '"heldout_size":4' in common
    assert (plan.setting.model, plan.setting.steps) == (str(workshop.model), 3)


def test_a_run_without_a_trained_drafter_leaves_arms_out_and_says_how_to_get_one(
    workshop: Workshop,
) -> None:
    plan = plan_of(workshop)
    assert list(plan.arms) == ["off", "history", "cold"]
    (note,) = plan.notes
    assert note.startswith("left out: frozen, spot: ")
    assert "give --drafter DIR" in note
    with pytest.raises(ConfigError, match="--arms = off,spot; left out: spot"):
        plan_of(workshop, arms=("off", "spot"))


def test_a_mistyped_drafter_and_a_run_that_never_drafts_are_refused(workshop: Workshop) -> None:
    with pytest.raises(ConfigError, match=r"speculation.drafter = 'no/where': no such directory"):
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


@pytest.mark.slow
def test_a_trainer_beside_the_arms_gets_their_texts_with_advantages_in_each_group(
    workshop: Workshop,
) -> None:
    tokenizer = load_tokenizer(workshop.model)
    rewards = {"a": (1.0, 0.0, 0.5), "b": (0.0, 0.0)}
    rollouts = [
        {"prompt_id": name, "reward": reward, "prompt": f"{name} + 1 =", "text": "12" * index}
        for name, own in rewards.items()
        for index, reward in enumerate(own)
    ]
    job = beside.turn(rollouts, tokenizer)
    assert job["advantages"] == [0.5, -0.5, 0.0, 0.0, 0.0]
    assert job["batches"] == [[0, 1, 2, 3, 4]]
    for text, prompt_len, each in zip(job["texts"], job["prompt_lens"], rollouts, strict=True):
        assert tokenizer.decode(text[:prompt_len]) == each["prompt"]
        assert tokenizer.decode(text[prompt_len:]) == (each["text"] or tokenizer.decode([0]))


def test_the_command_measures_a_run_and_ends_with_json(workshop: Workshop) -> None:
    path, words = run_file(workshop), ("--steps", "1", "--rollout.max_tokens", "8")
    beside_trl = f"--peer-python={sys.executable}"
    said = say("bench", "e2e", str(path), "--arms=off,cold", beside_trl, *words)
    assert said.code == 0, said.err
    assert said.out.startswith("With a drafter that learns while you train, a step of this run")
    assert "All arms wrote the same texts." in said.out
    found = json.loads(said.out.splitlines()[-1])
    assert (found["model"], found["steps"], found["workers"]) == (str(workshop.model), 1, 1)
    assert found["differing_share"] == {"cold": 0.0}
    assert (found["rewards_agree"], found["policies_agree"], found["parked"]) == (True, True, False)
    assert len(found["cold_step_gain_by_step"]) == 1
    assert found["trl_ratio"]["median"] > 0


@pytest.mark.parametrize("kind", ["missing", "without TRL"])
def test_a_python_without_trl_is_refused_before_the_arms(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    python = tmp_path / "python"
    if kind == "without TRL":
        python.write_text("#!/bin/sh\necho no module named trl >&2\nexit 1\n")
        python.chmod(0o755)
    monkeypatch.setattr("longtail.bench.e2e.measure.run_arms", lambda *_, **__: pytest.fail("late"))
    message = "no module named trl" if kind == "without TRL" else "--peer-python = .* cannot be"
    options = E2eBenchOptions(run=str(run_file(workshop)), arms=("off", "cold"))
    with pytest.raises(ConfigError, match=message):
        measure(replace(options, peer_python=str(python)), tmp_path, lambda line: None)


def test_parked_tensors_have_no_memory_and_come_back_with_their_bits(tmp_path: Path) -> None:
    first = torch.nn.Parameter(torch.randn(3, 5))
    tensors = [first, torch.randn(7).bfloat16(), torch.zeros(0, 2)]
    before = [each.detach().clone() for each in tensors]
    parking.write(tensors, tmp_path / "parked")
    parking.release(tensors)
    assert [each.shape for each in tensors] == [each.shape for each in before]
    assert sum(each.untyped_storage().nbytes() for each in tensors) <= 4 * len(tensors)
    parking.read(tensors, tmp_path / "parked")
    for one, other in zip(tensors, before, strict=True):
        assert torch.equal(one.detach(), other)
    assert tensors[0] is first
    assert first.is_contiguous()


# ---- memory


def test_arms_are_parked_only_if_they_do_not_fit_and_refused_if_that_does_not_help() -> None:
    arms = dict.fromkeys(("off", "spot"), ArmBytes(rest=2, parked=3, step=4, largest="x.y"))
    assert make_room(arms, None, can_park=True) == Room(needed=14, available=None, is_parked=False)
    assert make_room(arms, 15, can_park=True, shared=1).is_parked is False
    assert make_room(arms, 13, can_park=True) == Room(needed=11, available=13, is_parked=True)
    with pytest.raises(ConfigError, match=r"--arms = off,spot: they need at most 0.0 GB"):
        make_room(arms, 13, can_park=False)
    with pytest.raises(ConfigError, match=r"with arms parked on disk.*or measure fewer arms"):
        make_room(arms, 10, can_park=True)
    with pytest.raises(ConfigError, match=r"lower x.y; or, since"):
        make_room(arms, 8, can_park=True)


def test_a_refusal_names_arms_numbers_and_the_field_to_lower(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10_000_000)
    options = E2eBenchOptions(run=str(run_file(workshop)), arms=("off", "history"))
    with pytest.raises(ConfigError) as refused:
        measure(options, workshop.path / "refused", print)
    assert "0.0 GB are there" in str(refused.value)
    assert "lower learner.tokens_per_micro_batch" in str(refused.value)
    assert not (workshop.path / "refused").exists(), "before any work"


def test_a_drafter_is_counted_for_arms_that_have_one() -> None:
    def arm(drafter: str, train: str) -> ArmBytes:
        words = (f"--speculation.drafter={drafter}", f"--spot.train={train}")
        own = config.load(None, ["--cluster.workers=2", "--rollout.dtype=float32", *words])
        return room.arm_bytes(own, tiny_config("llama"), on_cpu=True)

    off, history = arm("none", "never"), arm("history", "never")
    frozen, spot = arm("tiny-reasoner", "never"), arm("tiny-reasoner", "spot")
    assert asdict(off) == asdict(history)
    assert off.rest < frozen.rest < spot.rest
    assert off.parked == spot.parked


def test_arms_are_not_parked_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {"off": config.load(None, ["--rollout.dtype=float32"])}
    room.check_disk(arms, tiny_config(), tmp_path)
    monkeypatch.setattr(machine, "disk_free", lambda path: 10)
    with pytest.raises(ConfigError, match=r"parked arms need .* set TMPDIR"):
        room.check_disk(arms, tiny_config(), tmp_path)
    monkeypatch.setattr(machine, "file_system", lambda path: "tmpfs")
    with pytest.raises(ConfigError, match="is in memory"):
        room.check_disk(arms, tiny_config(), tmp_path)


def _growth(arms: tuple[str, ...], words: tuple[str, ...]) -> tuple[int, int]:
    """Return the estimate of the embedded model's arms, and the growth of this process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "run.toml"
        path.write_text("")
        options = E2eBenchOptions(run=str(path), arms=arms, steps=1, overrides=words)
        plan = make_plan(options, Path(place))
        estimated, before = find_room(plan, Path(place)).needed, machine.resident_bytes() or 0
        run_arms(plan, print, is_parked=False)
        status = Path("/proc/self/status").read_text().splitlines()
        (highest,) = (int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
        return estimated, highest - before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is unknown")
def test_the_estimate_is_above_what_the_embedded_models_arms_take_and_within_twice_that() -> None:
    words = (
        *("--run.threads=1", "--run.device=cpu", "--data.heldout_size=0", "--data.size=64"),
        *("--rollout.prompts_per_step=4", "--rollout.max_tokens=96", "--rollout.max_running=32"),
        *("--data.max_prompt_len=32", "--learner.tokens_per_micro_batch=2048"),
    )
    model_directory(TINY_REASONER)  # made here, since what its making took would not be growth
    context = multiprocessing.get_context("spawn")  # a peak never falls
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        estimated, measured = pool.submit(_growth, ("off", "history"), words).result()
    assert measured <= estimated <= 2 * measured
