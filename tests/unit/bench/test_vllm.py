"""`longtail bench vllm` on a stand-in for the interpreter of an environment with vLLM."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from end_to_end.workshop import Workshop, build, save_untaught
from longtail.bench import vllm
from longtail.bench.common.subject import open_subject
from longtail.errors import ConfigError
from longtail.types import SamplingParams
from support.benches import parse

STAND_IN = """
import json, sys
spec = json.loads(sys.argv[-1])
rule = spec["rule"]
print(json.dumps({"ready": "vllm 0"}), flush=True)
for line in sys.stdin:
    turn = json.loads(line)
    tokens = [[1, 2, 3, 4 + (rule == "greedy")] for _ in turn["prompts"]]
    accepted = {"plain": 0, "greedy": 10, "probabilistic": 30}.get(rule, 20)
    drafts = 0 if rule == "plain" else 20
    print(json.dumps({"tokens": tokens, "num_drafts": drafts, "num_accepted": accepted,
                      "num_tokens": 4 * len(tokens), "cpu_seconds": 1.0,
                      "seconds": 2.0 if rule == "plain" else 1.0}), flush=True)
"""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return build(tmp_path_factory.mktemp("vllm"))


def measured(workshop: Workshop, tmp_path: Path, drafter: str) -> dict[str, list[Any]]:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/stand_in.py "$@"\n')
    python.chmod(0o755)
    options = parse(
        *("vllm", f"--python={python}", f"--drafter={drafter}", f"--model={workshop.model}"),
        *(f"--prompts={workshop.prompts}", "--n=3", "--repeats=2"),
    )
    subject = open_subject(
        options.model, options.prompts, dtype="float32", num_prompts=3,
        sampling=SamplingParams(max_tokens=options.max_tokens), log=print,
    )  # fmt: skip
    engine, turns = vllm.measure(subject, options, print)
    assert engine == "vllm 0"
    return turns


def test_rules_are_compared_with_plain_decoding_in_the_same_round(
    workshop: Workshop, tmp_path: Path
) -> None:
    drafter = save_untaught(workshop.model, workshop.path / "drafter")
    turns = measured(workshop, tmp_path, str(drafter))
    assert {len(own) for own in turns.values()} == {2}, "the warm-up is left out"
    result = json.loads(json.dumps(vllm.figures(turns)))
    assert result["accept_length"] == {"coupled": 2.0, "greedy": 1.5, "probabilistic": 2.5}
    assert result["differing_share"] == {"coupled": 0.0, "greedy": 1.0, "probabilistic": 0.0}
    assert result["throughput_ratio"]["coupled"]["median"] == 2.0
    rows = vllm.table("title", turns).cells()
    assert [row[0] for row in rows] == list(vllm.RULES.values())
    assert rows[2][1:] == ["1.500", "12 (12-12)", "2.00 (2.00-2.00)", "100%"]


def test_equal_texts_are_promised_in_float32_and_in_blocks() -> None:
    given = ("--python=p", "--drafter=d")
    exact, blocks, neither = (
        parse("vllm", *given, *more)
        for more in ((), ("--dtype=bfloat16", "--block-rows=32"), ("--dtype=bfloat16",))
    )
    assert [vllm.is_kept(0.3, each) for each in (exact, blocks, neither)] == [False, False, True]
    assert vllm.is_kept(0.0, exact)


def test_a_drafter_without_weights_cannot_be_compared(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--drafter = 'history': it has no EAGLE layer"):
        measured(workshop, tmp_path, "history")
