"""The tiny reasoner's tokenizer: exact round trips, digits, the chat template."""

from random import Random

import pytest

from longtail import tiny
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.rl.data import tiny_task as task
from longtail.tiny import tokenizer
from longtail.tiny.tokenizer import vocabulary


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.write(directory)
    return load_tokenizer(directory)


def test_the_model_has_a_row_for_every_token(words):
    assert words.vocab_size == tiny.model_config().vocab_size == len(set(vocabulary()))


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
