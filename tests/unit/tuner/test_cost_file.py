import json
from pathlib import Path

import pytest

from longtail.errors import CheckpointError, ConfigError
from longtail.tuner.cost import CostModel, DraftCost, TimeCurve
from longtail.tuner.cost_file import context_time, draft_times, load_costs, save_costs, step_times


def _costs() -> CostModel:
    costs = CostModel(TimeCurve((1, 8, 64), (0.001, 0.002, 0.01)), pair_s=1e-6, node_pair_s=1e-7)
    costs.drafts = [DraftCost(start_s=1e-3, request_s=0.0, level_s=1e-3, row_s=1e-4)]
    return costs


def test_a_cost_model_comes_back_from_its_file(tmp_path: Path) -> None:
    save_costs(tmp_path / "cost.json", _costs())
    save_costs(tmp_path / "cost.json", _costs())
    assert [path.name for path in tmp_path.iterdir()] == ["cost.json"]
    assert load_costs(tmp_path / "cost.json").numbers() == _costs().numbers()


def test_steps_and_drafts_are_described_in_milliseconds() -> None:
    times = step_times(_costs(), (1, 8))
    assert [(t.tokens, round(t.plain_ms, 9), round(t.verify_ms, 9)) for t in times] == [
        (1, 1.0, 1.0),
        (8, 2.0, 2.0),
    ]
    assert context_time(_costs()).startswith("1.000 ms more for each request")
    assert draft_times(_costs().drafts[0]) == (
        "a pass 1.000 ms and 0.1000 ms a row; a draft of 4 tokens 5.40 ms for 1, 8.20 ms for 8, "
        "17.80 ms for 32 requests"
    )


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", "7", "null", "[" * 100_000, "\x00", '{"plain": {}}'),
        json.dumps(_costs().numbers()).replace("0.001", "-1"),
        json.dumps(_costs().numbers()).replace("0.001", "NaN"),
        json.dumps(_costs().numbers()).replace("0.001", '"x"'),
        json.dumps(_costs().numbers()).replace("64", "Infinity"),
        json.dumps(_costs().numbers()).replace("start_s", "begin_s"),
    ],
)
def test_other_files_are_refused_with_the_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(ConfigError, match=r"cost\.json: damaged, or not a cost model; remove it"):
        load_costs(tmp_path / "cost.json")


def test_the_error_for_a_missing_file_names_its_writer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cost\.json: No such file.*; runs that measure"):
        load_costs(tmp_path / "cost.json")


def test_a_full_disk_is_reported_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="free some space"):
        save_costs(tmp_path / "nowhere" / "cost.json", _costs())
