import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from longtail.errors import CheckpointError
from longtail.run import summary as card_module
from longtail.run.checkpoint import Checkpoint
from longtail.run.summary import Card, finished_card, make_card, read_metrics


def _row(**changes: float | None) -> dict[str, float | None]:
    return {
        "response_length/p50": 10.0,
        "response_length/max": 80.0,
        "response_length/max_over_median": 8.0,
        "rollout/generated_tokens": 300.0,
        "rollout/tail_idle_share": 0.5,
        "timing_s/rollout": 6.0,
        "timing_s/reward": 1.0,
        "timing_s/logprob": 0.5,
        "timing_s/update": 1.5,
        "timing_s/step": 10.0,
        **changes,
    }


ROWS = [
    _row(**{"eval/reward_mean": 0.25}),
    _row(
        **{
            "eval/reward_mean": 0.75,
            "rollout/generated_tokens": 100.0,
            "rollout/tail_idle_share": 0.25,
            "timing_s/rollout": 2.0,
            "timing_s/step": 6.0,
            "response_length/max": 200.0,
            "response_length/max_over_median": 20.0,
        }
    ),
]


def _card(rows: list[dict[str, float | None]] = ROWS) -> Card:
    return make_card(rows, steps=len(rows), reward_after=0.5, seconds=30.0, warm_start_s=12.0)


def test_a_card_weighs_every_second_alike() -> None:
    card = _card()
    assert card.reward_before == 0.25  # of the first row, whatever came later
    assert card.reward_after == 0.5
    assert card.tokens_per_s == 400 / 8
    assert card.rollout_share == 8 / 16
    assert card.reward_share == 2 / 16
    assert card.logprob_share == 1 / 16
    assert card.update_share == 3 / 16
    assert card.other_share == pytest.approx(2 / 16)
    assert card.tail_idle_share == (0.5 * 6 + 0.25 * 2) / 8
    assert (card.length_p50, card.length_max, card.max_over_median) == (10.0, 200.0, 14.0)


def test_a_card_of_a_run_without_a_row_is_still_a_card() -> None:
    card = _card([])
    assert card.reward_before is None
    assert card.rollout_share == card.tail_idle_share == card.other_share == card.length_max == 0


def test_a_number_that_was_not_finite_counts_as_nothing() -> None:
    assert _card([_row(**{"rollout/tail_idle_share": None})]).tail_idle_share == 0.0


def test_a_card_comes_back_from_its_file(tmp_path: Path) -> None:
    card = _card()
    card.write(tmp_path / "card.json")
    assert [path.name for path in tmp_path.iterdir()] == ["card.json"]
    text = (tmp_path / "card.json").read_text()
    assert json.loads(text)["reward_before"] == 0.25
    checkpoint = Checkpoint(step=2, path=tmp_path, state={})
    assert finished_card(tmp_path, checkpoint, 2) == card


def test_a_run_is_finished_when_its_last_checkpoint_has_its_card(tmp_path: Path) -> None:
    card = _card()
    checkpoint = Checkpoint(step=2, path=tmp_path, state={})
    assert finished_card(tmp_path, checkpoint, 2) is None  # no card
    (tmp_path / "card.json").write_text('{"steps": 2')
    assert finished_card(tmp_path, checkpoint, 2) is None  # torn
    (tmp_path / "card.json").write_text('{"steps": 2}')
    assert finished_card(tmp_path, checkpoint, 2) is None  # of another version
    replace(card, steps=1).write(tmp_path / "card.json")
    assert finished_card(tmp_path, checkpoint, 2) is None  # of a shorter run
    card.write(tmp_path / "card.json")
    assert finished_card(tmp_path, checkpoint, 3) is None  # more steps are asked for
    assert finished_card(tmp_path, None, 2) is None
    assert finished_card(tmp_path, checkpoint, 1) == card


def test_a_card_that_cannot_be_written_says_that_nothing_else_is_lost(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"card\.json: .*; .* only the card is missing"):
        _card().write(tmp_path / "nowhere" / "card.json")


def test_metrics_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward/mean": null}\n{"step": 2, "reward/mean": 0.5}\n')
    assert read_metrics(path) == [
        {"step": 1, "reward/mean": None},
        {"step": 2, "reward/mean": 0.5},
    ]


def test_the_lines_say_what_was_reached_what_it_cost_and_where_it_is(tmp_path: Path) -> None:
    lines = dict(_card().lines(tmp_path))
    assert lines["held-out reward"] == "0.250 before, 0.500 after 2 steps"
    assert lines["time"] == "30 s (of them 12 s to warm-start the tiny reasoner, once)"
    assert lines["rollout speed"] == "50 tokens/s"
    assert lines["a step's time"] == "rollout 50%, reward 12%, logprob 6%, update 19%, other 12%"
    assert lines["lost to the tail"] == "44% of the rollout's places stood empty"
    assert lines["policy"] == str(tmp_path / "checkpoints" / "step_000002" / "policy")
    unknown = dict(replace(_card(), reward_before=None, warm_start_s=0.0).lines(tmp_path))
    assert unknown["held-out reward"] == "not measured before, 0.500 after 2 steps"
    assert unknown["time"] == "30 s"


def test_speculation_is_one_line_of_the_card(tmp_path: Path) -> None:
    assert "speculation" not in dict(_card().lines(tmp_path))
    plain = {"speculation/switches": 1.0, "speculation/tuner_share": 0.002}
    drafted = {
        "speculation/switches": 3.0,
        "speculation/tuner_share": 0.01,
        "speculation/accept_length": 2.5,
        "speculation/emitted_share": 0.75,
    }
    rows = [_row(**plain), _row(**drafted, **{"timing_s/rollout": 2.0})]
    card = _card(rows)
    assert card.num_switches == 4
    assert card.tuner_share == pytest.approx((0.002 * 6 + 0.01 * 2) / 8)  # by time
    assert dict(card.lines(tmp_path))["speculation"] == (
        "2.50 tokens a verify step, which wrote 75% of all tokens; 4 switches, tuner 0.4% of the "
        "time"
    )
    only = dict(_card(rows[:1]).lines(tmp_path))
    assert only["speculation"] == "1 switch, tuner 0.2% of the time"


def test_the_card_names_the_report_or_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    assert "report" not in dict(_card().lines(run))  # it did not speculate
    (run / "speculation.jsonl").touch()
    command = f"longtail report '{run}'"
    monkeypatch.setattr(card_module, "find_spec", lambda _: "there")
    assert dict(_card().lines(run))["report"] == f"to get one: {command}"
    monkeypatch.setattr(card_module, "find_spec", lambda _: None)
    assert dict(_card().lines(run))["report"].endswith(f"[plots]' && {command}")
    (run / "report.html").touch()
    assert dict(_card().lines(run))["report"] == str(run / "report.html")


def test_a_card_of_an_earlier_version_is_still_read(tmp_path: Path) -> None:
    document = json.loads(json.dumps(asdict(_card())))
    for name in ("num_switches", "tuner_share"):
        del document[name]
    (tmp_path / "card.json").write_text(json.dumps(document))
    assert finished_card(tmp_path, Checkpoint(step=2, path=tmp_path, state={}), 2) == _card()
