"""Examples to imitate: columns, chat messages, limits, batches and their cursor."""

import pytest

from longtail.errors import DataError
from longtail.rl.data.examples import Example, ExampleBatches, make_examples
from longtail.rl.data.prompts import Encoder
from support.tiny_models import tiny_tokenizer

WORDS = tiny_tokenizer()
ENCODER = Encoder(encode=WORDS.encode, render=WORDS.template.render)
PLAIN = Encoder(encode=WORDS.encode, render=None)
EOS = WORDS.eos_ids[0]
USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


def make(rows, encoder=PLAIN, **options):
    given = {"source": "x.jsonl", "encoder": encoder, "ends": WORDS.ends, "max_len": 64, **options}
    return make_examples(rows, **given)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "completion": "yo"},
        {"question": "hi", "response": "yo"},
        {"prompt": [USER], "completion": "yo"},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"messages": [USER, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        {"instruction": "hi", "input": "", "output": "yo"},
    ],
)
def test_every_layout_gives_the_same_example(row):
    ((example,), _) = make([row], encoder=ENCODER)
    prompt = WORDS.encode("<user>hi<eos><assistant>")
    assert example.tokens == (*prompt, *WORDS.encode("yo"), EOS)
    assert example.prompt_len == len(prompt)
    ((plain,), _) = make([{"prompt": "1+1=", "completion": "2"}])
    assert (plain.tokens, plain.prompt_len) == ((*WORDS.encode("1+1=2"), EOS), 4)


OPENED, EMPTY = "<assistant><think>\n", "<think>\n\n</think>"
THOUGHT = {"role": "assistant", "content": "<think>\nhm</think>yo"}


@pytest.mark.parametrize(
    ("begin", "turn", "answer", "target", "said"),
    [
        ("<assistant>", "{{ a }}<eos>\n", ASSISTANT, "yo<eos>", ""),
        ("<assistant>", "{{ a }}<pad>\n", ASSISTANT, "yo<pad>", ""),
        ("<assistant>", "{{ a }}\n\n", ASSISTANT, "yo<eos>", ""),
        ("<assistant>", "all {{ a }}<eos>", ASSISTANT, "all yo<eos>", ""),
        ("<assistant>", "{{ m.extra }}{{ a }}<eos>", {**ASSISTANT, "extra": "so"}, "soyo<eos>", ""),
        ("<assistant>", "{{ a }}<eos>", {**ASSISTANT, "reasoning": "so"}, "yo<eos>", "row 0: the"),
        (OPENED, EMPTY + "{{ a }}<eos>", ASSISTANT, "\n</think>yo<eos>", ""),
        (OPENED, "{{ a }}<eos>", ASSISTANT, "\n</think>\n\nyo<eos>", "'<user>hi<assistant><think>"),
        (OPENED, "{{ a[-2:] }}<eos>", THOUGHT, "hm</think>yo<eos>", "as 'hm</think>yo'"),
        ("<assistant>", "{{ a[-2:] }}<eos>", THOUGHT, "<think>\nhm</think>yo<eos>", "row 0: the"),
        ("<assistant>", "{{ raise_exception('x') }}", ASSISTANT, "yo<eos>", "change the messages"),
    ],
)
def test_the_target_is_what_the_template_writes_behind_the_prompt(
    begin, turn, answer, target, said, capsys
):
    words = tiny_tokenizer(
        "{% for m in messages %}{% set a = m['content'] %}{% if m['role'] == 'user' %}<user>{{ a }}"
        "{% else %}<assistant>" + turn + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + begin + "{% endif %}"
    )
    rows = [{"messages": [USER, answer]}] * 2
    examples, _ = make(rows, encoder=Encoder.of(words), ends=words.ends)
    assert examples[1].tokens[examples[1].prompt_len :] == words.encode(target)
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == bool(said), "once"


def test_columns_may_be_named():
    rows = [{"ask": "hi", "reply": "yo", "completion": "no"}]
    ((example,), _) = make(rows, prompt_column="ask", completion_column="reply")
    assert WORDS.decode(example.tokens) == "hiyo"


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"prompt": "hi"}, {}, r"row 0: no completion column.*data\.completion_column"),
        ({"prompt": "hi", "completon": "yo"}, {}, "did you mean completon"),
        ({"prompt": "hi", "reply": "x"}, {"completion_column": "reply_"}, "did you mean reply"),
        ({"prompt": "hi", "completion": 7}, {}, "completion is 7, expected text"),
        ({"completion": "yo"}, {}, "no prompt column"),
        ({"messages": [USER]}, {}, "not the assistant's"),
        ({"prompt": "hi", "completion": "y" * 99}, {}, r"102 tokens, data\.max_len is 64"),
    ],
)
def test_an_unusable_row_is_named(row, options, message):
    with pytest.raises(DataError, match=message):
        make([row], **options)


def test_long_examples_may_be_left_out_with_a_count():
    rows = [{"prompt": "hi", "completion": "y" * n} for n in (1, 99, 2)]
    examples, num_dropped = make(rows, drop_long=True)
    assert (len(examples), num_dropped) == (2, 1)
    with pytest.raises(DataError, match="all 1 examples are longer"):
        make(rows[1:2], drop_long=True)


EXAMPLES = [Example(tokens=(*range(3 + number % 7), number), prompt_len=1) for number in range(20)]


def batches(budget: int) -> ExampleBatches:
    return ExampleBatches(EXAMPLES, budget, seed=3)


def test_batches_keep_their_budget_and_visit_every_example_once_an_epoch():
    source, found = batches(20), list[Example]()
    while len(found) < 40:
        batch = source.take()
        assert 1 <= sum(len(each.tokens) for each in batch) <= 20
        found += batch
    orders = found[:20], found[20:40]
    assert orders[0] != orders[1]
    assert {*orders[0]} == {*orders[1]} == {*EXAMPLES}
    assert len(batches(2).take()) == 1, "an example over the budget"


def test_a_restored_cursor_goes_on_with_the_very_next_batch():
    source, other = batches(20), batches(20)
    for _ in range(5):
        source.take()
    other.restore(source.state())
    assert [other.take() for _ in range(9)] == [source.take() for _ in range(9)]
    for state, words in (({}, "num_examples = None"), ({"num_examples": 20}, "other rows")):
        with pytest.raises(DataError, match=f"the run began with {words}"):
            ExampleBatches(EXAMPLES, 20, 3, {"rows": "x"}).restore(state)
