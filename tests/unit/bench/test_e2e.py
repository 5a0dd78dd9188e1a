"""`longtail bench e2e`: its ratios, its predictions and its card."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from longtail.bench.e2e import card
from longtail.bench.e2e.arms import ArmResult, SaveTimes, differing_share
from longtail.bench.e2e.by_running import by_running, plain_step
from longtail.bench.e2e.options import E2eBenchOptions
from longtail.bench.e2e.outlook import MeasuredStep, Outlook, outlook, speedup_by_running
from longtail.bench.e2e.plan import Setting
from longtail.bench.e2e.plot import draw_curves
from longtail.bench.e2e.task import write_prompts
from longtail.engine.rollout_log import RolloutSeries
from longtail.errors import ConfigError
from longtail.rl.data.prompts import Encoder, make_prompts
from longtail.rl.data.sources import load_rows
from longtail.tuner.cost import CostModel, TimeCurve
from longtail.types import Prompt
from support.fakes import do_without


def arm(rollouts: list[float], others: float, **texts: str) -> ArmResult:
    """Steps of the given seconds of rollout, and `others` seconds of everything else."""
    rows = [
        {
            "timing_s/rollout": rollout,
            "timing_s/step": rollout + others,
            "reward/mean": 0.5,
            "cluster/generating_s": rollout,
            "cluster/idle_s": rollout / 2,
            "cluster/spot_s": rollout / 2,
            "cluster/idle_utilization": 0.5,
            "cluster/reused_share": 0.25,
            "cluster/spot_stop_latency_s": 0.1 * index,
            "speculation/accept_length": 3.0 + index,
        }
        for index, rollout in enumerate(rollouts)
    ]
    return ArmResult(metrics=rows, texts=texts)


SETTING = Setting(model="tiny", workers=2, threads=1, steps=3)
FOUND = {
    "off": arm([8.0, 4.0, 6.0], 2.0, a="one", b="two"),
    "spot": arm([2.0, 2.0, 2.0], 2.0, a="one", b="three"),
}


def test_ratios_are_taken_step_by_step() -> None:
    found = card.as_json(SETTING, FOUND)
    assert found["rollout_speedup"]["spot"] == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert found["step_speedup"]["spot"] == {"median": 2.0, "low": 1.5, "high": 2.5}
    assert found["differing_share"] == {"spot": 0.5}
    assert found["rewards_agree"] is True
    assert found["idle_utilization"] == 0.5
    assert found["reused_share"] == 0.25
    assert found["stop_latency_s"] == {"median": 0.1, "max": 0.2}
    assert found["accept_length"] == {"spot": [3.0, 4.0, 5.0]}
    assert found["idle_share"]["off"] == 0.5
    json.dumps(found)


def test_a_differing_reward_is_reported() -> None:
    other = arm([2.0, 2.0, 2.0], 2.0)
    other.metrics[1]["reward/mean"] = 0.25
    assert not card.as_json(SETTING, {**FOUND, "spot": other})["rewards_agree"]


def test_the_card_has_a_line_for_each_arm_in_all_tables() -> None:
    compared, lengths, parts = card.tables(SETTING, FOUND)
    assert compared.title.startswith("Training tiny end to end, 2 workers")
    assert parts.title.startswith("Seconds of a step")
    for table in (compared, lengths, parts):
        assert [row[0] for row in table.cells()] == ["off", "spot"]


def test_the_accept_length_is_shown_for_a_dozen_steps_at_most() -> None:
    (table,) = card._accept_table({"off": ArmResult(), "spot": arm([1.0] * 30, 1.0)})
    assert list(table.columns)[:3] == ["arm", "1", "4"]
    assert list(table.columns)[-1] == "30"
    assert table.cells()[0][1:3] == ["3.00", "6.00"]
    assert len(table.columns) == 13
    assert card._accept_table({"off": ArmResult()}) == []


# ---- what a user would gain


def shares(spot: float | None = None, cold: list[float] | None = None) -> list[str]:
    """Return the card's sentences for arms whose steps take these shares of ten seconds."""
    found = {"off": arm([10.0] * 6, 0.0)}
    if spot is not None:
        found["spot"] = arm([10.0 * spot] * 6, 0.0)
    if cold is not None:
        found["cold"] = arm([10.0 * share for share in cold], 0.0)
    return card.sentences(found)


def test_the_first_sentence_says_what_a_learning_drafter_gains() -> None:
    gain, texts = shares(0.71)
    assert gain == (
        "With a drafter that learns while you train, a step of this run took 0.71x of the time "
        "(trained before: a gain)."
    )
    assert texts == "All arms wrote the same texts."


def test_the_sentence_is_honest_about_nothing_and_about_a_loss() -> None:
    assert "1.01x of the time (trained before: no gain)" in shares(1.01)[0]
    assert "1.20x of the time (trained before: a loss)" in shares(1.2)[0]
    assert shares() == ["All arms wrote the same texts."]
    few = {"off": arm([10.0] * 2, 0.0), "spot": arm([5.0] * 2, 0.0)}
    assert "0.50x of the time (trained before: too few steps to tell)" in card.sentences(few)[0]


def test_a_cold_start_is_told_by_its_later_half_too() -> None:
    cold = [1.1, 1.1, 1.0, 0.9, 0.8, 0.8]
    assert shares(0.5, cold)[0].endswith(
        "0.50x of the time (trained before: a gain), and 0.95x of the time (fresh at its start: a "
        "gain; in the last 3 steps 0.80x: a gain)."
    )
    found = {"off": arm([10.0] * 6, 0.0), "cold": arm([10.0 * share for share in cold], 0.0)}
    gains = card.as_json(SETTING, found)["cold_step_gain_by_step"]
    assert gains == pytest.approx([1 / share for share in cold])
    assert card.as_json(SETTING, FOUND)["cold_step_gain_by_step"] is None


def test_texts_that_differ_are_said_before_any_table() -> None:
    assert card.sentences(FOUND)[-1].startswith("NOTE: up to 50.00% of the texts differ")


def test_only_texts_of_both_arms_are_compared() -> None:
    assert differing_share(arm([], 0.0, a="x", b="y"), arm([], 0.0, b="y", c="z")) == 0.0
    assert differing_share(arm([], 0.0), arm([], 0.0)) == 0.0


# ---- another task in mid-run


def prompts_of(source: str, size: int) -> tuple[Prompt, ...]:
    encoder = Encoder(encode=lambda text: text.encode(), render=lambda chat: chat[0]["content"])
    rows = load_rows(source, size, 0)
    return make_prompts(rows, source=source, encoder=encoder, max_prompt_len=100).prompts


@pytest.mark.slow
def test_a_switched_task_has_the_same_problems_in_other_words(tmp_path: Path) -> None:
    options = E2eBenchOptions(steps=5, prompts=3, switch_task=4)
    found = prompts_of(str(write_prompts(tmp_path, options)), 0)
    usual = prompts_of("tiny-reasoner", 2048)[:15]
    assert found[:9] == usual[:9]
    assert not {each.text for each in found[9:]} & {each.text for each in usual}
    for one, other in zip(found, usual, strict=True):
        assert (one.prompt_id, one.data["answer"]) == (other.prompt_id, other.data["answer"])


# ---- more workers

FLAT = CostModel(TimeCurve((1, 64), (0.001, 0.001)), pair_s=0.0, node_pair_s=0.0)
"""A step takes a millisecond, whatever is in it."""


def drafting(running: tuple[int, ...], accepted: tuple[int, ...], step_s: float) -> RolloutSeries:
    return RolloutSeries(
        seconds=tuple(step_s * (index + 1) for index in range(len(running))),
        running=running,
        drafts=running,
        nodes=accepted,
        accepted=accepted,
        readings=((),) * len(running),
        switches=(),
    )


def test_a_speedup_is_tokens_a_second_over_those_of_plain_steps() -> None:
    # 4 running: 4 + 12 tokens in 2 ms, plainly 4 in 1 ms; 1 running: 1 + 1 in 2 ms, 1 in 1 ms.
    series = [drafting((4, 4), (12, 12), 0.002), drafting((1,), (1,), 0.002)]
    faster = speedup_by_running(series, plain_step(FLAT, [10]))
    assert faster(4) == pytest.approx(2.0)
    assert faster(1) == pytest.approx(1.0)
    assert 1.0 < faster(2) < 2.0
    assert faster(100) == faster(4)


def test_steps_are_told_apart_by_octaves_of_running_requests() -> None:
    series = [drafting((5, 4, 3), (15, 12, 0), 0.002), drafting((1, 1), (1, 0), 0.001)]
    one, two, four = by_running(series, plain_step(FLAT, [10]))
    assert [each.low for each in (one, two, four)] == [1, 2, 4]
    assert [each.share for each in (one, two, four)] == pytest.approx([0.25, 0.25, 0.5])
    assert [each.drafting_share for each in (one, two, four)] == [0.5, 0.0, 1.0]
    assert [each.speedup for each in (one, two, four)] == pytest.approx([1.5, 0.5, 2.0])
    assert by_running([], plain_step(FLAT, [10])) == ()


def test_the_card_says_where_the_time_of_the_rollouts_went() -> None:
    spot = ArmResult(lengths=[10], costs=FLAT, series=[drafting((4, 1), (12, 0), 0.002)])
    (table,) = card._octave_table({"off": ArmResult(), "spot": spot})
    assert list(table.columns) == ["arm", "4-7", "1"]
    assert table.cells() == [["spot", "50% at 2.00x", "50% at 0.50x"]]
    assert card._octave_table({"off": ArmResult()}) == []


def test_a_plain_step_reads_the_context_of_a_token_drawn_at_random() -> None:
    costs = CostModel(TimeCurve((1, 64), (0.001, 0.001)), pair_s=1e-6, node_pair_s=0.0)
    # Of 30 tokens, 10 have 5 behind them on average, 20 have 10: 25 / 3.
    assert plain_step(costs, [10, 20])(3) == pytest.approx(0.001 + 3e-6 * 25 / 3)


def looked_out(costs: CostModel = FLAT, *series: RolloutSeries) -> list[Outlook]:
    """A token in half the time, with drafts, however many are running; learning takes a second."""
    measured = MeasuredStep(
        lengths=[10, 1000],
        series=series or [drafting((1,), (1,), 0.001)],
        costs=costs,
        writing_s=(1.0, 0.5),
        requests_per_worker=4,
        learning_s=1.0,
    )
    return outlook(measured, (1, 16))


def test_learning_dilutes_what_the_rollout_gains() -> None:
    few, many = looked_out()
    assert few.rollout_gain == pytest.approx(2.0)
    assert many.rollout_gain == pytest.approx(2.0)
    assert few.idle_share == 0.0
    assert many.idle_share > 0.0
    # A worker writes for a second, half a second with drafts; many wait for the last one, too.
    assert few.step_gain == pytest.approx(2.0 / 1.5)
    waited = 1.0 / (1.0 - many.idle_share)
    assert many.step_gain == pytest.approx((waited + 1.0) / (waited / 2 + 1.0))


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_costs_that_are_wrong_by_a_factor_change_no_prediction(factor: float) -> None:
    right, wrong = (
        CostModel(TimeCurve((1, 64), (0.001 * f, 0.02 * f)), pair_s=1e-7 * f, node_pair_s=0.0)
        for f in (1.0, factor)
    )
    series = drafting((4, 1), (4, 3), 0.002)
    for one, other in zip(looked_out(right, series), looked_out(wrong, series), strict=True):
        assert asdict(one) == pytest.approx(asdict(other))


def test_the_card_shows_how_far_the_prediction_is_from_the_measured_workers() -> None:
    off, spot = arm([4.0] * 3, 2.0), arm([2.0] * 3, 2.0)
    off.lengths, spot.lengths = [[50] * 48] * 2
    spot.series, spot.costs = [drafting((1,), (1,), 0.001)], FLAT
    for row in off.metrics:  # of 8 seconds of two workers' rollout
        row["cluster/generating_s"] = 6.0
    for row in spot.metrics:
        row["cluster/generating_s"] = 4.0
    found = {"off": off, "spot": spot}
    # Workers with equal lengths do not wait: 3 seconds, 2 with drafts; it was 4 and 2.
    assert card.as_json(SETTING, found)["prediction_error"] == pytest.approx(-0.25)
    assert any(table.title.endswith("-25%") for table in card.tables(SETTING, found))


def test_a_cold_start_has_caught_up_with_the_step_that_accepts_as_much() -> None:
    cold, frozen = arm([1.0] * 3, 1.0), arm([1.0] * 3, 1.0)
    for row, length in zip(cold.metrics, (1.0, 4.5, 4.0), strict=True):
        row["speculation/accept_length"] = length
    found = {"off": FOUND["off"], "frozen": frozen, "cold": cold}
    assert card.as_json(SETTING, found)["steps_until_frozen"] == 1


def test_checkpoint_times_are_compared_save_by_save() -> None:
    spot = arm([2.0, 2.0, 2.0], 2.0, a="one", b="two")
    spot.saves = [SaveTimes(own_s=0.001, full_s=0.010), SaveTimes(own_s=0.001, full_s=0.020)]
    ratio = card.as_json(SETTING, {**FOUND, "spot": spot})["checkpoint_ratio"]
    assert ratio == pytest.approx({"median": 0.075, "low": 0.05, "high": 0.1})


@pytest.mark.slow
def test_curves_are_drawn_of_arms_that_draft(tmp_path: Path) -> None:
    by_arm = {"off": [0.0, 0.0], "spot": [2.0, 2.5], "frozen": [2.0, 1.9]}
    draw_curves(by_arm, tmp_path / "c.png")
    draw_curves(by_arm, tmp_path / "switched.png", switch_step=2)
    plain, switched = ((tmp_path / name).read_bytes() for name in ("c.png", "switched.png"))
    assert plain.startswith(b"\x89PNG")
    assert switched.startswith(b"\x89PNG")
    assert switched != plain, "the switch is marked"


def test_curves_need_matplotlib_and_name_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do_without(monkeypatch, "matplotlib")
    with pytest.raises(ConfigError, match="plots need matplotlib"):
        draw_curves({"spot": [2.0]}, tmp_path / "c.png")
