"""Texts that `longtail drafter train` learns, as its chat template writes them."""

import json
from datetime import datetime

import pytest

from longtail.config import files
from longtail.config.drafter import DrafterTrainConfig
from longtail.errors import ConfigError
from longtail.programs.drafter_data import given_texts
from support.tiny_models import CHAT_TEMPLATE, tiny_tokenizer

TOKENIZER = tiny_tokenizer("{{ strftime_now('%Y ') }}" + CHAT_TEMPLATE)


def config(tmp_path, row):
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    words = [f"--data.source={tmp_path / 'x.jsonl'}", "--data.system_prompt=So."]
    return files.resolve(DrafterTrainConfig, None, [*words, "--data.completions=given"])


def test_given_texts_have_the_system_prompt_and_the_time_of_the_run(tmp_path):
    row = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "Ho"}]}
    corpus = given_texts(config(tmp_path, row), TOKENIZER, datetime(1999, 1, 1))
    assert [TOKENIZER.decode(each.tokens) for each in corpus.training] == ["1999 <system>So.hiHo"]


def test_whole_texts_have_no_system_prompt(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.text_column = 'text': .* leave data\.system_p"):
        given_texts(config(tmp_path, {"text": "hi"}), TOKENIZER, datetime(1999, 1, 1))
