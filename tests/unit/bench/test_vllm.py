"""`longtail bench vllm` on a stand-in for the interpreter of an environment with vLLM."""

import json
import sys

import pytest
import torch

from longtail.assembly.drafters import Target
from longtail.bench.vllm import card, live, rules
from longtail.bench.vllm.subject import Reply, differing_share, open_subject
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.drafter.formats.checkpoint import TrainingRecord, identity, save_drafter
from longtail.errors import ConfigError
from support.benches import parse
from support.tiny_models import tiny_model, tiny_tokenizer

PROMPTS = [(5, 6), (7, 8), (9,)]
STAND_IN = """
import json, sys
spec = json.loads(sys.argv[-1])
rule, adopted = spec["rule"], "earlier" not in spec["drafter"]
print(json.dumps({"ready": "vllm 0"}), flush=True)
for line in sys.stdin:
    turn = json.loads(line)
    adopted = adopted or turn["adopt"] is not None
    tokens = [[1, 2, 3, 4 + (rule == "greedy")] for _ in turn["prompts"]]
    accepted = {"plain": 0, "greedy": 10, "probabilistic": 30}.get(rule, 20 if adopted else 5)
    drafts = 0 if rule == "plain" else 20
    print(json.dumps({"tokens": tokens, "num_drafts": drafts, "num_accepted": accepted,
                      "seconds": 2.0 if rule == "plain" else 1.0, "cpu_seconds": 1.0}), flush=True)
"""


@pytest.fixture
def subject(tmp_path):
    """Return a function that opens a tiny target with a drafter and a stand-in interpreter."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    layer = EagleLayer(EagleConfig(recipe="eagle3", target=model.config, layers=(0, 1)))
    layer.initialize(torch.Generator().manual_seed(1))
    record = TrainingRecord(steps=1, tokens=1, unroll_steps=1)
    save_drafter(tmp_path / "drafter", layer, None, identity("x", model, tokenizer), record)
    target = Target(model=model, tokenizer=tokenizer, directory=tmp_path, name="x")
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/stand_in.py "$@"\n')
    python.chmod(0o755)

    def make(*words):
        options = parse(
            "vllm", "--python", str(python), "--drafters", str(tmp_path / "drafter"),
            "--dtype", "bfloat16", "--repeats", "2", *words,
        )  # fmt: skip
        return options, open_subject(options, target, PROMPTS, print)

    return make


def test_rules_are_compared_with_plain_decoding_in_the_same_round(subject):
    options, opened = subject()
    with opened as found:
        measured = rules.measure_rules(found, options, print)
        table = card.rules_table(measured, found, options, "not pinned")
    assert measured.accept_length == {"coupled": 2.0, "greedy": 1.5, "probabilistic": 2.5}
    assert measured.differing() == {"coupled": 0.0, "greedy": 1.0, "probabilistic": 0.0}
    result = json.loads(json.dumps(card.rules_json(measured)))
    assert result["differing_share"] == 0.0
    assert result["throughput_ratio"]["coupled"]["median"] == 2.0
    assert result["own_texts_share"] is None  # only in float32
    assert [row[0] for row in table.cells()] == list(card._WORDS.values())


def test_a_drafter_is_adopted_in_the_second_turn(subject):
    options, opened = subject()
    with opened as found:
        assert found.drafter.is_dir()
        measured = live.measure_live(found, options, print)
    assert measured.adopted_gain == 2.0 / 1.25
    assert measured.differing_share == 0.0
    assert card.live_json(measured)["adopted_accept_length"]["before"] == 1.25
    assert "0% of the texts change" in card.live_table(measured, options).title


def test_equal_texts_are_promised_in_float32_and_in_blocks(subject):
    assert card.is_equal(0.0, subject()[0])
    assert card.is_equal(0.3, subject()[0])
    assert not card.is_equal(0.3, subject("--block-rows", "32")[0])


def test_shares_and_speeds_are_of_whole_texts():
    assert differing_share([(1, 2), (3,)], [[1, 2], [4]]) == 0.5
    reply = Reply(
        tokens=((1, 2, 3), (4,)), num_drafts=2, num_accepted=3, seconds=2.0, cpu_seconds=2.0
    )
    assert (reply.tokens_per_s, reply.accept_length) == (2.0, 2.5)


def test_a_drafter_without_weights_cannot_be_compared(subject):
    _, opened = subject("--earlier", "history")
    with pytest.raises(ConfigError, match="no EAGLE layer"), opened:
        pass
