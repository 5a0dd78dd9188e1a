"""Runs with drafters: resumed, logged, refused. test_law10_accelerators.py compares their texts."""

import pytest
import torch

from end_to_end.workshop import Workshop, build, read_lines, save_untaught
from longtail.model.kernels import native

pytestmark = pytest.mark.skipif(
    native.layout(torch.float32) is None, reason="bit equality in float32 is the native kernels'"
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    shop = build(tmp_path_factory.mktemp("speculative"))
    assert shop.train("plain", "--run.steps=3", "--speculation.drafter=none").code == 0
    save_untaught(shop.model, shop.path / "drafter", "eagle3")
    save_untaught(shop.path / "tied", shop.path / "other", "eagle3")
    return shop


@pytest.mark.slow
def test_what_speculation_did_is_kept_once_a_step_if_a_run_is_resumed_with_another_drafter(
    workshop,
):
    assert workshop.train("logged", "--run.steps=2").code == 0
    path = workshop.path / "logged" / "speculation.jsonl"
    with path.open("a") as file:
        file.write('{"step": 3, "seconds": [0.0')  # killed in its third step
    words = ("--run.steps=3", "--speculation.drafter=history", "--speculation.max_running=4")
    said = workshop.train("logged", *words)
    assert said.code == 0
    mine, plain = workshop.outcome("logged", 3), workshop.outcome("plain", 3)
    assert mine["weights"] == plain["weights"]
    assert mine["rollouts"] == plain["rollouts"]
    report = workshop.path / "logged" / "report.html"
    assert str(report) in said.out
    assert "/api/runs/0/steps/1/rollouts/0" in report.read_text()
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
    assert read_lines(workshop.path / "plain" / "speculation.jsonl") == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--speculation.drafter=other",), "longtail drafter train"),
        (("--speculation.width=8", "--speculation.depth=9"), "at most 62; lower one of them"),
    ],
)
def test_what_cannot_draft_is_refused_before_any_work(workshop, monkeypatch, words, expected):
    monkeypatch.chdir(workshop.path)
    said = workshop.train("refused", "--speculation.drafter=history", *words)
    assert said.code == 2
    assert expected in said.err
    assert not (workshop.path / "refused" / "metrics.jsonl").exists()
