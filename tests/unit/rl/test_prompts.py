from dataclasses import replace

import pytest

from longtail.config.rewards import RewardSection
from longtail.errors import ConfigError, DataError
from longtail.rl.data.prompts import Encoder, PromptSource, fingerprint, hold_out, make_prompts
from longtail.rl.grading.pool import GraderPool, gradable
from longtail.rl.grading.reward import Grader

PLAIN = Encoder(encode=lambda text, **_: tuple(text.encode()), render=None)
BEGUN = Encoder(
    encode=lambda text, add_special_tokens: (0,) * add_special_tokens + tuple(text.encode()),
    render=None,
)
CHAT = Encoder(
    encode=lambda text, **_: tuple(text.encode()),
    render=lambda messages, tools: (
        "".join(f"<{m['role']}>{m['content']}" for m in [*(tools or ()), *messages]) + "<bot>"
    ),
)


def prompts_of(rows, encoder=PLAIN, **options):
    options = {"source": "/data/train.jsonl", "max_prompt_len": 50, **options}
    return make_prompts(rows, encoder=encoder, **options)


def numbered(count):
    return prompts_of([{"prompt": f"{number}?", "answer": number} for number in range(count)])


def visited(taken):
    return [(one.epoch, one.prompt.prompt_id) for one in taken]


USER = {"role": "user", "content": "6*7="}
BRIEF = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("prompt", "encoder", "text"),
    [
        ("6*7=", PLAIN, "6*7="),
        ("6*7=", CHAT, "<user>6*7=<bot>"),
        ([BRIEF, USER], CHAT, "<system>Be brief.<user>6*7=<bot>"),
    ],
)
def test_text_or_messages_are_rendered_and_the_row_is_kept_for_the_reward(prompt, encoder, text):
    row = {"prompt": prompt, "solution": "42", "level": 3}
    (found,) = prompts_of([row], encoder).prompts
    assert (found.prompt_id, found.text, found.tokens) == ("train/0", text, tuple(text.encode()))
    assert found.data == {**row, "answer": "42"}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"question": "6*7=", "ground_truth": "42"}, {}),
        # verl's layout
        (
            {
                "prompt": "6*7=",
                "reward_model": {"style": "rule", "ground_truth": "42"},
                "extra_info": {"index": 7, "split": "train"},
            },
            {},
        ),
        (
            {"prompt": "no", "answer": "no", "task": "6*7=", "gold": "42"},
            {"prompt_column": "task", "answer_column": "gold"},
        ),
    ],
)
def test_the_usual_columns_are_found_named_ones_win_and_all_are_kept(row, named):
    (prompt,) = prompts_of([row], **named).prompts
    assert prompt.text == "6*7="
    assert prompt.data == {**row, "prompt": "6*7=", "answer": "42"}


def test_ids_are_row_numbers_even_where_rows_before_were_dropped():
    rows = [{"prompt": "a"}, {"prompt": "b" * 99}, {"prompt": "c"}]
    kept = prompts_of(rows, drop_long=True)
    assert [prompt.prompt_id for prompt in kept.prompts] == ["train/0", "train/2"]
    assert kept.num_dropped == 1


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (("x1", "x2"), ["train/x1", "train/x2"]),
        (("x", "x"), ["train/0", "train/1"]),
        (("1", 1), ["train/0", "train/1"]),
    ],
)
def test_an_id_column_names_the_prompts_unless_it_has_gaps_or_repeats(ids, named):
    rows = [{"prompt": "a", "id": ids[0]}, {"prompt": "b", "id": ids[1]}]
    assert [prompt.prompt_id for prompt in prompts_of(rows).prompts] == named


NOT_A_PROMPT = r"row 1: the prompt is .*, expected text or a list of mess"


@pytest.mark.parametrize(
    ("prompt", "encoder", "message"),
    [
        ("b" * 51, PLAIN, r"row 1: .* 51 tokens, .* is 50; .* data\.drop_long_prompts = true"),
        ("b" * 48, CHAT, "59 tokens"),  # the chat template counts, too
        ("", CHAT, "row 1: the prompt is empty"),
        ([], CHAT, "row 1: the prompt is empty"),
        (7, CHAT, NOT_A_PROMPT),
        ([{"role": "user"}], CHAT, NOT_A_PROMPT),
        ([USER], PLAIN, "row 1: .* no chat template"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named(prompt, encoder, message):
    with pytest.raises(DataError, match=message):
        prompts_of([{"prompt": "a"}, {"prompt": prompt}], encoder)


def test_messages_that_the_template_refuses_are_named_by_row():
    def refuse(messages, tools):
        raise ConfigError("roles must alternate")

    with pytest.raises(DataError, match="row 0: roles must alternate"):
        prompts_of([{"prompt": "a"}], Encoder(encode=PLAIN.encode, render=refuse))


@pytest.mark.parametrize(
    ("shuffle", "order"), [(True, "40651324236105"), (False, "01234560123456")]
)
def test_an_epoch_is_every_prompt_in_an_order_of_its_seed_and_number(shuffle, order):
    taken = visited(PromptSource(numbered(7), seed=3, shuffle=shuffle).take(14))
    assert [number.removeprefix("train/") for _, number in taken] == list(order)


def test_plain_prompts_begin_with_special_tokens():
    rows = [{"prompt": "ab"}, {"prompt": "c"}]
    assert [each.tokens for each in prompts_of(rows, BEGUN).prompts] == [(0, 97, 98), (0, 99)]
    chat = replace(BEGUN, render=lambda messages, tools: messages[0]["content"])
    assert [each.tokens for each in prompts_of(rows, chat).prompts] == [(97, 98), (99,)]


@pytest.mark.parametrize(
    ("order", "change", "message"),
    [
        ({}, {"rows": "x"}, r"^data\.source: the run began with other rows; .* run\.dir"),
        ({}, {"settings": "x"}, "began with another chat template, or settings of it; restore"),
        ({"seed": 1}, {}, "began with seed = "),
    ],
)
def test_a_cursor_of_another_order_is_refused(order, change, message):
    state = PromptSource(numbered(5), seed=0).state()
    with pytest.raises(DataError, match=message):
        PromptSource(numbered(5), **{"seed": 0, **order}).restore({**state, **change})


def test_the_fingerprint_sees_all_of_a_row():
    base = [{"prompt": "a", "answer": (1, {2: object()})}, {"prompt": "b"}]
    changed = [
        [base[0], {"prompt": "c"}],
        [{**base[0], "id": 5}, base[1]],
        [{"prompt": "a", "answer": (3, {2: object()})}, base[1]],
        base[:1],
    ]
    assert len({fingerprint(rows) for rows in [base, base, *changed]}) == 1 + len(changed)


def test_a_source_is_resumed_though_its_template_writes_another_date():
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    first, later = (
        PromptSource(prompts_of(rows, replace(CHAT, render=lambda *_, day=day, **__: day)), seed=0)
        for day in ("Friday", "Saturday")
    )
    first.take(1)
    later.restore(first.state())
    assert later.take(1)[0].prompt.prompt_id == first.take(1)[0].prompt.prompt_id


PARTS = [{"type": "text", "text": part} for part in ("6*", "7=")]
CHAT_LOG = [{"from": "human", "value": "6*7="}, {"from": "gpt", "value": "42"}]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"instruction": "Add.", "input": "6, 7", "output": "13"}, "<user>Add.\n\n6, 7<bot>"),
        ({"instruction": "Add.", "input": "", "output": "13"}, "<user>Add.<bot>"),
        ({"instruction": "Add.", "context": "6, 7", "response": "13"}, "<user>Add.\n\n6, 7<bot>"),
        ({"conversations": CHAT_LOG}, "<user>6*7=<bot>"),
        ({"conversations": CHAT_LOG, "system": "Be brief."}, "<system>Be brief.<user>6*7=<bot>"),
        ({"messages": [USER]}, "<user>6*7=<bot>"),
        ({"question": "6*7=", "system_prompt": "So."}, "<system>So.<user>6*7=<bot>"),
        ({"prompt": [CHAT_LOG[0]]}, "<user>6*7=<bot>"),
        ({"prompt": "6*7=", "system": "So."}, "<system>So.<user>6*7=<bot>"),
        ({"prompt": [USER | {"content": PARTS}]}, "<user>6*7=<bot>"),
        ({"prompt": "a", "tools": '[{"name": "f", "role": 1, "content": 2}]'}, "<1>2<user>a<bot>"),
    ],
)
def test_all_that_a_known_format_has_is_in_the_prompt(row, text):
    assert prompts_of([row], CHAT).prompts[0].text == text


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"text": "", "gold": ""}, {}, "no prompt column; it has .* text, gold.*prompt,"),
        ({"prompt": "b" * 51}, {"drop_long": True}, "all 1 prompts are longer"),
        (
            {"prompt": "a", "solution": "42"},
            {"answer_column": "solutoin"},
            r"data\.answer_column = 'solutoin': .*did you mean solution\?\); found .* prompt, sol",
        ),
        ({"question": "a", "choices": ["b"]}, {}, r"beside 'question' .* 'choices', which would"),
        (
            {"instruction": "a", "input": {"b": 1}},
            {},
            r"data\.prompt_column = 'instruction' to leave",
        ),
        ({"instruction": "a", "input": "b", "history": [["c", "d"]]}, {}, "the column 'history'"),
        ({"prompt": "a", "tools": "[{}]"}, {}, "row 0: the column 'tools' is '\\[{}\\]', expected"),
        ({"messages": '[{"role": "user"}]'}, {}, "row 0: messages is the text"),
    ],
)
def test_columns_that_cannot_be_used_or_would_be_missing_are_named(row, options, message):
    with pytest.raises(DataError, match=message):
        prompts_of([row], CHAT, **options)


def test_a_named_column_is_the_whole_prompt():
    row = {"instruction": "no", "input": "6*7=", "question": "no", "context": "no"}
    for column, text in (("input", "<user>6*7=<bot>"), ("question", "<user>no<bot>")):
        assert prompts_of([row], CHAT, prompt_column=column).prompts[0].text == text


# ---- rows that no completion can be graded by are found before any work


def answered(*answers):
    rows = [{"prompt": f"{n}?", "solution": answer} for n, answer in enumerate(answers)]
    return prompts_of(rows, source="math.jsonl", drop_long=True)


def gradable_here(prompts, *, drop=False):
    return gradable(prompts, "exact", Grader("exact").check, drop=drop)


@pytest.mark.parametrize("answer", [None, float("nan"), "", "####", [1]], ids=repr)
def test_the_row_the_column_the_value_and_the_remedy_are_named(answer):
    with pytest.raises(DataError) as raised:
        gradable_here(answered("42", "41", answer, answer))
    said = str(raised.value)
    assert said.startswith("data.source = 'math.jsonl', row 2, column 'solution': reward")
    assert ("lacks (it has prompt, solution, answer)" if answer is None else repr(answer)) in said
    assert "1 more of 4 rows have such faults" in said
    assert "data.drop_ungradable = true" in said


def test_rows_that_cannot_be_graded_may_be_left_out():
    kept = gradable_here(answered("1", float("nan"), "3", None, 4.0), drop=True)
    assert [prompt.prompt_id for prompt in kept.prompts] == ["math/0", "math/2", "math/4"]
    assert kept.rows == (0, 2, 4)
    assert hold_out(kept, 1).heldout.rows == (4,)


def test_alike_rows_are_checked_once():
    asked = []

    def check(rows):
        asked.extend(rows)
        return [None] * len(rows)

    gradable(answered("1", "2", "1", 1), "exact", check, drop=False)
    assert asked == [{"answer": "1"}, {"answer": "2"}, {"answer": 1}]
    gradable(answered("1", "2"), "any:function", check, drop=False)
    assert asked[3:] == [dict.fromkeys(["prompt", "solution", "answer"])]


def test_graders_check_rows_in_their_own_processes():
    answers = ["1", float("nan"), "", "2"]
    with GraderPool(RewardSection(name="exact", workers=2)) as pool:
        reasons = pool.check([{"answer": answer} for answer in answers])
        with pytest.raises(DataError, match=r"row 1, column 'solution': .* is nan"):
            gradable(answered(*answers), "exact", pool.check, drop=False)
    assert [why is None for why in reasons] == [True, False, False, True]
    assert "is nan, expected text or a finite number" in str(reasons[1])
