"""Texts that `longtail drafter train` learns, as its chat template writes them."""

import json
from datetime import datetime

import pytest

from longtail.assembly.drafters import Target
from longtail.config import files
from longtail.config.command_options import EvalOptions
from longtail.config.drafter import DrafterTrainConfig
from longtail.config.rl import RunConfig
from longtail.errors import ConfigError
from longtail.programs.drafter_data import given_sequences
from longtail.programs.drafter_eval import find_prompts
from longtail.run.checkpoint import RunDirectory
from support.tiny_models import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer("{{ strftime_now('%Y ') }}" + CHAT_TEMPLATE)


def config(tmp_path, row):
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    words = [f"--data.source={tmp_path / 'x.jsonl'}", "--data.system_prompt=So."]
    return files.resolve(DrafterTrainConfig, None, [*words, "--data.completions=given"])


def test_given_texts_have_the_system_prompt_and_the_time_of_the_run(tmp_path):
    row = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "Ho"}]}
    corpus = given_sequences(config(tmp_path, row), TOKENIZER, datetime(1999, 1, 1))
    assert [TOKENIZER.decode(each.tokens) for each in corpus.training] == ["1999 <system>So.hiHo"]


def test_whole_texts_have_no_system_prompt(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.text_column = 'text': .* leave data\.system_p"):
        given_sequences(config(tmp_path, {"text": "hi"}), TOKENIZER, datetime(1999, 1, 1))


def test_prompts_that_a_run_held_out_are_evaluated_as_the_run_wrote_them(tmp_path):
    config = files.resolve(RunConfig, None, ["--data.size=4", "--data.heldout_size=1"])
    with RunDirectory(tmp_path) as run:
        run.start(files.render(config), resume=True)
        run.begun = datetime(1999, 1, 1)
        run.save(1, lambda path: None, {}, {})
    args = EvalOptions(drafter=str(tmp_path), target="", n=1, max_tokens=1)
    target = Target(model=tiny_model(), tokenizer=TOKENIZER, directory=tmp_path, name="x")
    (prompt,) = find_prompts(args, target)
    assert TOKENIZER.decode(prompt).startswith("1999 ")
