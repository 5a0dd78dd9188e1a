"""Training with a drafter writes what training without one writes, to the last bit."""

import json
from pathlib import Path

import pytest
import torch

from end_to_end.workshop import Workshop, build, read_lines, say
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.drafter.formats.checkpoint import TrainingRecord, identity, save_drafter
from longtail.model.hf.model import load_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.kernels import native

pytestmark = pytest.mark.skipif(
    native.product(torch.float32) is None, reason="bit equality in float32 is the native kernels'"
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    shop = build(tmp_path_factory.mktemp("speculative"))
    assert shop.train("plain", "--run.steps=3", "--speculation.drafter=none").code == 0
    return shop


def make_drafter(shop: Workshop, name: str, model: Path | None = None) -> Path:
    """An EAGLE-3 drafter without training, of a model in the workshop."""
    place = model or shop.model
    target, tokenizer = load_model(place), load_tokenizer(place)
    layer = EagleLayer(EagleConfig(recipe="eagle3", target=target.config, layers=(0, 1), window=16))
    layer.initialize(torch.Generator().manual_seed(1))
    record = TrainingRecord(steps=0, tokens=0, unroll_steps=1)
    path = shop.path / name
    save_drafter(path, layer, None, identity(str(place), target, tokenizer), record)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["history", "eagle"])
def test_rewards_texts_and_weights_are_those_of_the_run_without_a_drafter(workshop, drafter):
    name = drafter if drafter == "history" else str(make_drafter(workshop, "drafter"))
    words = (f"--speculation.drafter={name}", "--speculation.depth=3", "--run.steps=3")
    words += ("--speculation.tuner=fixed",)
    assert workshop.train(drafter, *words).code == 0
    mine, plain = workshop.outcome(drafter, 3), workshop.outcome("plain", 3)
    rows = [
        {
            key: value
            for key, value in row.items()
            if not key.startswith(("speculation/", "drafter/"))
        }
        for row in mine.pop("metrics")
    ]
    assert rows == plain.pop("metrics")
    assert mine == plain
    logged = read_lines(workshop.path / drafter / "speculation.jsonl")
    assert any(any(line["drafts"]) for line in logged)  # the guard may have paused it since
    drafted = [row for row in workshop.metrics(drafter) if row["speculation/nodes_per_step"]]
    assert all(1.0 <= row["speculation/accept_length"] <= 4.0 for row in drafted)
    assert (workshop.summary(drafter)["accept_length"] is not None) == bool(drafted)


@pytest.mark.slow
def test_a_run_may_be_resumed_with_another_drafter(workshop):
    assert workshop.train("changed", "--run.steps=1").code == 0
    words = ("--run.steps=3", "--speculation.drafter=history", "--speculation.max_running=4")
    assert workshop.train("changed", *words).code == 0
    mine, plain = workshop.outcome("changed", 3), workshop.outcome("plain", 3)
    assert mine["weights"] == plain["weights"]
    assert mine["rollouts"] == plain["rollouts"]


@pytest.mark.slow
def test_what_speculation_did_is_kept_once_a_step_however_often_a_run_is_resumed(workshop):
    words = ("--speculation.drafter=history", "--run.checkpoint_every=1")
    assert workshop.train("logged", "--run.steps=2", *words).code == 0
    path = workshop.path / "logged" / "speculation.jsonl"
    with path.open("a") as file:
        file.write('{"step": 3, "seconds": [0.0')  # killed in its third step
    assert workshop.train("logged", "--run.steps=3", *words).code == 0
    rows = read_lines(path)
    assert [row["step"] for row in rows if row["kind"] == "training"] == [1, 2, 3]
    drafts = read_lines(path.with_name("drafts.jsonl"))
    assert [row["step"] for row in drafts] == [1, 2, 3]
    # Before the first step and after the last; that after the second step was cut back.
    assert [row["step"] for row in rows if row["kind"] == "evaluation"] == [1, 4]
    trained = [row for row in rows if row["kind"] == "training"]
    for row, series in zip(workshop.metrics("logged"), trained, strict=True):
        assert row["speculation/switches"] == len(series["switches"])
        assert row["speculation/nodes_per_step"] == sum(series["nodes"]) / len(series["nodes"])
        assert max(series["running"]) <= 16
    assert not (workshop.path / "plain" / "speculation.jsonl").exists()


@pytest.mark.slow
def test_a_run_ends_with_a_report_and_the_summary_says_where(workshop):
    said = workshop.train("reported", "--speculation.drafter=history", "--run.steps=1")
    assert said.code == 0
    path = workshop.path / "reported" / "report.html"
    assert str(path) in said.out
    assert "/api/runs/0/steps/1/rollouts/0" in path.read_text()


def test_generate_with_a_drafter_writes_the_same_and_tells_the_accept_length(workshop):
    words = ["generate", str(workshop.model), "--prompt", "say 7", "--n", "3", "--json"]
    words += ["--max-tokens", "20", "--threads", "1"]
    plain = say(*words, "--drafter", "none")
    drafted = say(*words, "--drafter", str(make_drafter(workshop, "drafter")))
    assert (plain.code, drafted.code) == (0, 0)
    assert drafted.out == plain.out
    assert "accept length" in drafted.err
    assert "accept length" not in plain.err


def test_a_drafter_of_another_target_is_refused_before_any_work(workshop):
    other = make_drafter(workshop, "other", workshop.path / "tied")
    said = workshop.train("refused", f"--speculation.drafter={other}")
    assert said.code == 2
    assert "longtail drafter train" in said.err
    assert not (workshop.path / "refused" / "metrics.jsonl").exists()


def test_a_drafter_that_cannot_be_is_named_with_what_can(workshop):
    said = workshop.train("refused", "--speculation.drafter=nowhere")
    assert said.code == 2
    assert "neither history, fresh nor a directory" in said.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--speculation.width=8", "--speculation.depth=9"), "at most 62; lower one of them"),
        (("--speculation.depth=33",), "speculation.depth"),
    ],
)
def test_a_draft_without_room_is_refused_before_any_work(workshop, words, expected):
    said = workshop.train("refused", "--speculation.drafter=history", *words)
    assert said.code == 2
    assert expected in said.err
    assert not (workshop.path / "refused" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_evaluating_a_drafter_shows_a_table_and_one_line_of_json(workshop):
    said = say(
        *("drafter", "eval", str(make_drafter(workshop, "drafter"))),
        *("--target", str(workshop.model), "--prompts", str(workshop.prompts)),
        *("--n", "4", "--max-tokens", "20", "--depth", "3", "--size", "4"),
        *("--temperatures", "0,1"),
    )
    assert said.code == 0
    assert "acceptance rate by depth" in said.out
    measured = json.loads(said.out.splitlines()[-1])["measured"]
    assert [each["shape"] for each in measured].count("tree") == 3  # greedy: coupled says nothing
    assert all(each["differing_share"] == 0.0 for each in measured)
    depths = {"chain": {3}, "tree": {2, 3}}  # a tree of an unsure drafter is wide
    assert all(len(each["acceptance_rate_by_depth"]) in depths[each["shape"]] for each in measured)
