"""Examples to imitate: columns, chat messages, limits, batches and their cursor."""

import pytest

from longtail.errors import DataError
from longtail.rl.data.examples import ExampleBatches, example_of, make_examples
from longtail.rl.data.prompts import Encoder, PromptSource
from support.tiny_models import tiny_tokenizer

WORDS = tiny_tokenizer()
ENCODER = Encoder(encode=WORDS.encode, render=WORDS.render)
PLAIN = Encoder(encode=WORDS.encode, render=None)
EOS = WORDS.eos_ids[0]


def make(rows, encoder=PLAIN, **options):
    given = {"source": "x.jsonl", "encoder": encoder, "eos_id": EOS, "max_len": 64, **options}
    return make_examples(rows, **given)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "completion": "yo"},
        {"question": "hi", "response": "yo"},
        {"prompt": [{"role": "user", "content": "hi"}], "completion": "yo"},
        {
            "prompt": [{"role": "user", "content": "hi"}],
            "completion": [{"role": "assistant", "content": "yo"}],
        },
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "yo"},
            ]
        },
    ],
)
def test_every_layout_gives_the_same_example(row):
    example = example_of(make([row], encoder=ENCODER).prompts[0])
    prompt = WORDS.encode("<user>hi<eos><assistant>")
    assert example.tokens == (*prompt, *WORDS.encode("yo"), EOS)
    assert example.prompt_len == len(prompt)
    plain = example_of(make([{"prompt": "1+1=", "completion": "2"}]).prompts[0])
    assert (plain.tokens, plain.prompt_len) == ((*WORDS.encode("1+1=2"), EOS), 4)


def test_columns_may_be_named():
    rows = [{"ask": "hi", "reply": "yo", "completion": "no"}]
    example = example_of(make(rows, prompt_column="ask", completion_column="reply").prompts[0])
    assert WORDS.decode(example.tokens) == "hiyo"


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"prompt": "hi"}, {}, r"row 0: no completion column.*data\.completion_column"),
        ({"prompt": "hi", "completon": "yo"}, {}, "did you mean 'completon'"),
        ({"prompt": "hi", "reply": "x"}, {"completion_column": "reply_"}, "did you mean 'reply'"),
        ({"prompt": "hi", "completion": " "}, {}, "expected text"),
        ({"prompt": "hi", "completion": 7}, {}, "completion is 7, expected text"),
        ({"prompt": "", "completion": "yo"}, {}, "the prompt is empty"),
        ({"completion": "yo"}, {}, "no prompt column"),
        ({"messages": [{"role": "user", "content": "hi"}]}, {}, "not the assistant's"),
        ({"prompt": "hi", "completion": "y" * 99}, {}, r"102 tokens, data\.max_len is 64"),
    ],
)
def test_an_unusable_row_is_named(row, options, message):
    with pytest.raises(DataError, match=message):
        make([row], **options)


def test_long_examples_may_be_left_out_with_a_count():
    rows = [{"prompt": "hi", "completion": "y" * n} for n in (1, 99, 2)]
    examples = make(rows, drop_long=True)
    assert (len(examples.prompts), examples.num_dropped) == (2, 1)
    with pytest.raises(DataError, match="all 1 examples are longer"):
        make(rows[1:2], drop_long=True)


def batches(budget: int) -> ExampleBatches:
    rows = [{"prompt": "p", "completion": "c" * (1 + n % 7)} for n in range(20)]
    return ExampleBatches(PromptSource(make(rows), seed=3), budget)


def test_batches_keep_their_budget_and_visit_every_example_once_an_epoch():
    source, lengths = batches(20), []
    while len(lengths) < 20:
        batch = source.take()
        assert 1 <= sum(len(e.tokens) for e in batch) <= 20
        lengths += [len(e.tokens) for e in batch]
    assert sorted(lengths[:20]) == sorted(3 + n % 7 for n in range(20))
    assert len(batches(2).take()) == 1, "an example over the budget"


def test_a_restored_cursor_goes_on_with_the_very_next_batch():
    source = batches(20)
    for _ in range(5):
        source.take()
    other = batches(20)
    other.restore(source.state())
    assert [other.take() for _ in range(9)] == [source.take() for _ in range(9)]
