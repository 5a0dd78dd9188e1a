"""The embedded model: its files, and its tokenizer, which writes every text exactly."""

import json
from random import Random

import pytest
import torch
from torch.nn import functional

from longtail.drafter.formats.checkpoint import load_drafter
from longtail.model.attention import PackedAttention
from longtail.model.hf.model import load_config, load_model
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.rl.data import tiny_task as task
from longtail.tiny import DRAFTERS, REASONER
from support import toy_tokenizer
from support.toy_tokenizer import vocabulary


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return load_tokenizer(REASONER)


def test_the_tokenizer_is_the_scripts(words, tmp_path):
    toy_tokenizer.write(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shipped, written = (
            json.loads((place / name).read_text()) for place in (REASONER, tmp_path)
        )
        assert shipped == written


def test_the_model_has_a_row_for_every_token(words):
    assert words.vocab_size == load_config(REASONER).vocab_size == len(set(vocabulary()))


@pytest.mark.parametrize("recipe", DRAFTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drafter_is_of_just_these_weights_in_either_dtype(words, recipe, dtype):
    model = load_model(REASONER, dtype)
    loaded = load_drafter(DRAFTERS[recipe], model, words, strict_weights=True)
    assert loaded.layer.config.recipe == recipe


def test_the_model_expects_solutions_that_it_never_saw(words):
    model = load_model(REASONER, torch.float32)
    for example in task.examples(8, seed=1):
        prompt = words.chat(example["prompt"])
        tokens = torch.tensor((*prompt, *words.encode(example["completion"])))
        attention = PackedAttention([0, len(tokens)])
        positions = torch.arange(len(tokens), dtype=torch.int32)
        with torch.no_grad():
            hidden = model(tokens, positions, attention)
            logits = model.logits(hidden[len(prompt) - 1 : -1])
        assert functional.cross_entropy(logits, tokens[len(prompt) :]) < 1.0


def test_solutions_round_trip_without_a_character_alone(words):
    tokens = vocabulary()
    for example in task.examples(200, 0):
        for text in (example["completion"], example["prompt"][0]["content"]):
            ids = words.encode(text)
            assert words.decode(ids) == text
            letters = [tokens[i] for i in ids if tokens[i].isalpha() and len(tokens[i]) == 1]
            assert set(letters) <= {"I", "A"}, letters  # every word of the task is one token


def test_any_ascii_text_round_trips(words):
    rng = Random(0)
    alphabet = "".join(chr(c) for c in range(32, 127)) + "\n\t"
    for _ in range(200):
        text = "".join(rng.choice(alphabet) for _ in range(40))
        assert words.decode(words.encode(text)) == text


def test_a_word_inside_a_longer_word_is_not_cut_out(words):
    tokens = vocabulary()
    assert [tokens[i] for i in words.encode(" is island")] == [" is", " ", *"island"]


def test_a_number_is_one_token_a_digit_and_its_first_digit_is_marked(words):
    tokens = vocabulary()
    assert [tokens[i] for i in words.encode("12: to 808")] == [
        "1", "2", ":", " to", " 8", "0", "8",
    ]  # fmt: skip


def test_what_is_not_ascii_is_unknown(words):
    assert words.encode("\u00e9") == (vocabulary().index("<unk>"),)


def test_a_conversation_ends_where_the_assistant_begins(words):
    messages = [{"role": "user", "content": "How many steps from 6 to 1?"}]
    assert words.render(messages) == "<user>How many steps from 6 to 1?<assistant>"
    ids = words.chat([*messages, {"role": "assistant", "content": "8"}], generation_prompt=False)
    assert ids[-1] == words.eos_ids[0]


def test_thinking_survives_decoding_and_the_end_of_text_does_not(words):
    ids = (*words.encode("<think>\n</think>\n8."), words.eos_ids[0])
    assert words.decode(ids) == "<think>\n</think>\n8."
