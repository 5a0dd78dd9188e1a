"""`longtail bench vllm`: its figures, what it promises and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from end_to_end.workshop import build
from longtail.bench import vllm
from longtail.bench.common.subject import open_subject
from longtail.config.rl import load
from longtail.errors import ConfigError
from support.benches import parse


def turns_of(num_accepted: int, seconds: float, last_token: int = 4) -> list[dict[str, Any]]:
    turn = {
        "tokens": [[1, 2, 3, last_token]] * 3,
        "num_tokens": 12,
        "num_drafts": 20,
        "num_accepted": num_accepted,
        "seconds": seconds,
        "cpu_seconds": seconds,
    }
    return [turn, turn]


def test_rules_are_compared_with_plain_decoding_in_the_same_round() -> None:
    turns = {"plain": turns_of(0, 2.0), "loop": turns_of(0, 2.0), "coupled": turns_of(20, 1.0)}
    turns |= {"learned": turns_of(30, 0.5)}
    turns |= {"greedy": turns_of(10, 1.0, last_token=5), "probabilistic": turns_of(30, 1.0)}
    figures = vllm.figures(turns)
    result = json.loads(json.dumps(figures))
    assert result["accept_length"] == {
        "learned": 2.5, "coupled": 2.0, "greedy": 1.5, "probabilistic": 2.5,
    }  # fmt: skip
    assert result["differing_share"] == {
        "loop": 0.0, "learned": 0.0, "coupled": 0.0, "greedy": 1.0, "probabilistic": 0.0,
    }  # fmt: skip
    assert result["throughput_ratio"]["coupled"]["median"] == 2.0
    rows = {row[0]: row[1:] for row in vllm.table("title", figures).cells()}
    assert rows[vllm.RULES["greedy"]] == ["1.500", "12 (12-12)", "2.00 (2.00-2.00)", "100%"]


def test_equal_texts_are_promised_in_float32_and_in_blocks() -> None:
    given = ("--python=p",)
    exact, blocks, neither = (
        parse("vllm", *given, *more)
        for more in ((), ("--dtype=bfloat16", "--block-rows=32"), ("--dtype=bfloat16",))
    )
    assert [vllm.is_kept(0.3, each) for each in (exact, blocks, neither)] == [False, False, True]
    assert vllm.is_kept(0.0, exact)


def test_a_drafter_without_weights_cannot_be_compared(tmp_path: Path) -> None:
    workshop = build(tmp_path)
    words = (
        f"--model.path={workshop.model}",
        f"--data.source={workshop.prompts}",
        "--texts=3",
        "--data.heldout_size=0",
    )
    options = parse("vllm", f"--python={sys.executable}", *words)
    config = load(None, options.overrides)
    assert vllm.own_drafter(config) is None
    subject = open_subject(config, 3, print)
    with pytest.raises(ConfigError, match="'history': it has no weights"):
        vllm._export("history", subject, options, tmp_path / "out")
