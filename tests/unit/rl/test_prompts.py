import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.errors import ConfigError, DataError
from longtail.rl.data.prompts import (
    Encoder,
    PromptSource,
    fingerprint,
    hold_out,
    make_prompts,
    system_first,
)

PLAIN = Encoder(encode=lambda text: tuple(text.encode()), render=None)
CHAT = Encoder(
    encode=lambda text: tuple(text.encode()),
    render=lambda messages: "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<bot>",
)


def prompts_of(rows, encoder=PLAIN, **options):
    options = {"source": "/data/train.jsonl", "max_prompt_len": 50, **options}
    return make_prompts(rows, encoder=encoder, **options)


def numbered(count):
    return prompts_of([{"prompt": f"{number}?", "answer": number} for number in range(count)])


def visited(taken):
    return [(one.epoch, one.prompt.prompt_id) for one in taken]


# ------------------------------------------------------------------------------ layouts


def test_text_without_a_chat_template_is_read_as_it_is():
    (prompt,) = prompts_of([{"prompt": "6*7=", "answer": "42", "level": 3}]).prompts
    assert prompt.prompt_id == "train/0"
    assert (prompt.text, prompt.tokens) == ("6*7=", tuple(b"6*7="))
    assert prompt.data == {"prompt": "6*7=", "answer": "42", "level": 3}


def test_text_becomes_one_user_message_where_there_is_a_chat_template():
    (prompt,) = prompts_of([{"prompt": "6*7="}], CHAT).prompts
    assert prompt.text == "<user>6*7=<bot>"
    assert prompt.tokens == tuple(b"<user>6*7=<bot>")
    assert prompt.data["prompt"] == "6*7="


def test_chat_messages_are_rendered_and_kept_for_the_reward():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7="}]
    (prompt,) = prompts_of([{"prompt": messages, "solution": "42"}], CHAT).prompts
    assert prompt.text == "<system>Be brief.<user>6*7=<bot>"
    assert prompt.data == {"prompt": messages, "solution": "42", "answer": "42"}


BRIEF = Encoder(encode=CHAT.encode, render=system_first(CHAT.render, "Be brief."))


def test_a_system_prompt_stands_before_every_prompt_but_those_with_their_own():
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "b"}]
    rows = [{"prompt": "a"}, {"prompt": own}, {"prompt": own[1:]}]
    assert [prompt.text for prompt in prompts_of(rows, BRIEF).prompts] == [
        "<system>Be brief.<user>a<bot>",
        "<system>Be long.<user>b<bot>",
        "<system>Be brief.<user>b<bot>",
    ]
    assert prompts_of(rows, BRIEF).prompts[0].data["prompt"] == "a"


def test_a_template_that_leaves_the_system_prompt_out_is_refused():
    deaf = Encoder(
        encode=CHAT.encode, render=system_first(lambda chat: chat[-1]["content"], "Be brief.")
    )
    with pytest.raises(DataError, match=r"data\.system_prompt = 'Be brief\.'.*leaves system"):
        prompts_of([{"prompt": "a"}], deaf)


def test_verls_layout_gives_the_ground_truth_and_keeps_every_column():
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "6*7="}],
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"index": 7, "split": "train"},
    }
    (prompt,) = prompts_of([row], CHAT).prompts
    assert prompt.data == {**row, "answer": "42"}


@pytest.mark.parametrize("column", ["answer", "ground_truth", "solution"])
def test_the_usual_answer_columns_are_found(column):
    (prompt,) = prompts_of([{"question": "6*7=", column: "42"}]).prompts
    assert (prompt.text, prompt.data["answer"]) == ("6*7=", "42")


def test_named_columns_win_over_the_usual_ones():
    row = {"prompt": "no", "answer": "no", "task": "6*7=", "gold": "42"}
    (prompt,) = prompts_of([row], prompt_column="task", answer_column="gold").prompts
    assert (prompt.text, prompt.data["prompt"], prompt.data["answer"]) == ("6*7=", "6*7=", "42")


def test_rows_without_an_answer_have_none():
    (prompt,) = prompts_of([{"prompt": "6*7="}]).prompts
    assert "answer" not in prompt.data


# ------------------------------------------------------------------------------ ids


def test_ids_are_row_numbers_even_where_rows_before_were_dropped():
    rows = [{"prompt": "a"}, {"prompt": "b" * 99}, {"prompt": "c"}]
    kept = prompts_of(rows, drop_long=True)
    assert [prompt.prompt_id for prompt in kept.prompts] == ["train/0", "train/2"]
    assert kept.num_dropped == 1


def test_a_unique_id_column_names_the_prompts():
    rows = [{"prompt": "a", "id": "x1"}, {"prompt": "b", "id": "x2"}]
    named = prompts_of(rows, source="hf:owner/name:test").prompts
    assert [prompt.prompt_id for prompt in named] == ["test/x1", "test/x2"]


@pytest.mark.parametrize("ids", [("x", "x"), ("x", None), ("x", ""), ("1", 1)])
def test_an_id_column_with_gaps_or_repeats_is_not_used(ids):
    rows = [{"prompt": "a", "id": ids[0]}, {"prompt": "b", "id": ids[1]}]
    assert [prompt.prompt_id for prompt in prompts_of(rows).prompts] == ["train/0", "train/1"]


# ------------------------------------------------------------------------------ bad input


def test_no_rows_is_an_error():
    with pytest.raises(DataError, match=r"train\.jsonl': it holds no rows"):
        prompts_of([])


def test_a_missing_prompt_column_lists_the_columns_found():
    with pytest.raises(
        DataError, match=r"no prompt column; it has the columns text, gold.*prompt,"
    ):
        prompts_of([{"text": "6*7=", "gold": "42"}])


@pytest.mark.parametrize("setting", ["prompt_column", "answer_column"])
def test_a_wrong_column_name_lists_the_columns_and_suggests_the_nearest(setting):
    match = (
        rf"data\.{setting} = 'solutoin': .* did you mean 'solution'\?; found .* prompt, solution"
    )
    with pytest.raises(DataError, match=match):
        prompts_of([{"prompt": "6*7=", "solution": "42"}], **{setting: "solutoin"})


def test_a_later_row_without_the_prompt_column_is_named():
    with pytest.raises(DataError, match="row 1: the column 'prompt' is missing"):
        prompts_of([{"prompt": "a"}, {"text": "b"}])


def test_a_prompt_over_the_limit_names_row_length_limit_and_remedy():
    rows = [{"prompt": "a"}, {"prompt": "b" * 51}]
    match = r"row 1: .* 51 tokens, .* is 50; .* data\.drop_long_prompts = true"
    with pytest.raises(DataError, match=match):
        prompts_of(rows)


def test_the_limit_itself_is_allowed():
    assert prompts_of([{"prompt": "b" * 50}]).num_dropped == 0


def test_the_chat_template_counts_towards_the_limit():
    with pytest.raises(DataError, match="59 tokens"):
        prompts_of([{"prompt": "b" * 48}], CHAT)


def test_dropping_every_prompt_is_an_error():
    with pytest.raises(DataError, match="all 1 prompts are longer"):
        prompts_of([{"prompt": "b" * 51}], drop_long=True)


@pytest.mark.parametrize("empty", ["", "  \n", []])
def test_an_empty_prompt_is_named(empty):
    with pytest.raises(DataError, match="row 1: the prompt is empty"):
        prompts_of([{"prompt": "a"}, {"prompt": empty}], CHAT)


@pytest.mark.parametrize(
    "prompt", [None, 7, {"role": "user"}, ["a"], [{"role": "user"}], [{"role": 1, "content": ""}]]
)
def test_a_prompt_that_is_neither_text_nor_messages_is_named(prompt):
    with pytest.raises(
        DataError, match=r"row 0: the prompt is .*, expected text or a list of mess"
    ):
        prompts_of([{"prompt": prompt}], CHAT)


def test_messages_without_a_chat_template_are_refused():
    with pytest.raises(DataError, match=r"row 0: .* the tokenizer has no chat template"):
        prompts_of([{"prompt": [{"role": "user", "content": "a"}]}])


def test_messages_that_the_template_refuses_are_named_by_row():
    def refuse(messages):
        raise ConfigError("roles must alternate")

    with pytest.raises(DataError, match="row 0: roles must alternate"):
        prompts_of([{"prompt": "a"}], Encoder(encode=PLAIN.encode, render=refuse))


# ------------------------------------------------------------------------------ held out


def test_the_held_out_prompts_are_the_last_ones():
    parts = hold_out(numbered(5), 2)
    assert [prompt.text for prompt in parts.train.prompts] == ["0?", "1?", "2?"]
    assert [prompt.text for prompt in parts.heldout.prompts] == ["3?", "4?"]


def test_holding_out_everything_is_an_error():
    with pytest.raises(DataError, match=r"data\.heldout_size = 5: .* has 5 prompts"):
        hold_out(numbered(5), 5)


# ------------------------------------------------------------------------------ the cursor


def test_each_epoch_visits_each_prompt_once_in_another_order():
    taken = PromptSource(numbered(20), seed=1).take(60)
    orders = [[one.prompt.prompt_id for one in taken if one.epoch == e] for e in range(3)]
    assert [sorted(order) for order in orders] == [sorted(orders[0])] * 3
    assert len({tuple(order) for order in orders}) == 3
    assert len(orders[0]) == 20


def test_another_seed_is_another_order_and_no_shuffle_is_the_files_order():
    prompts = numbered(20)
    first, second = (PromptSource(prompts, seed=seed).take(20) for seed in (1, 2))
    assert visited(first) != visited(second)
    plain = PromptSource(prompts, seed=1, shuffle=False).take(40)
    assert visited(plain) == [(e, p.prompt_id) for e in (0, 1) for p in prompts.prompts]


@pytest.mark.slow
def test_the_order_depends_on_seed_and_epoch_alone_in_any_process():
    program = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import test_prompts as t; "
        "s = t.PromptSource(t.numbered(7), seed=3); "
        "print(json.dumps([t.visited(s.take(14)), s.state()]))"
    )
    path = json.dumps([str(Path(__file__).parent), *sys.path])
    there = subprocess.run(
        [sys.executable, "-c", program, path],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    source = PromptSource(numbered(7), seed=3)
    here = [visited(source.take(14)), source.state()]
    assert json.loads(there.stdout) == json.loads(json.dumps(here))


def test_a_take_may_cross_several_epochs():
    taken = PromptSource(numbered(2), seed=0).take(5)
    assert [one.epoch for one in taken] == [0, 0, 1, 1, 2]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    before=st.lists(st.integers(0, 9), max_size=5),
    after=st.lists(st.integers(1, 9), max_size=5),
    count=st.integers(1, 6),
)
def test_a_restored_source_goes_on_where_the_saved_one_stood(before, after, count):
    prompts = numbered(count)
    whole = visited(PromptSource(prompts, seed=5).take(sum(before) + sum(after)))
    saved = PromptSource(prompts, seed=5)
    first = list(chain.from_iterable(visited(saved.take(n)) for n in before))
    state = json.loads(json.dumps(saved.state()))
    restored = PromptSource(prompts, seed=5)
    restored.take(3)  # wherever it stood before
    restored.restore(state)
    then = list(chain.from_iterable(visited(restored.take(n)) for n in after))
    assert first + then == whole


def test_a_cursor_of_other_prompts_is_refused_by_name():
    state = PromptSource(numbered(5), seed=0).state()
    rows = [{"prompt": f"{number}?", "answer": number + 1} for number in range(5)]
    other = PromptSource(prompts_of(rows), seed=0)
    match = rf"train\.jsonl': .* fingerprint = '{state['fingerprint']}', now it is .* run\.dir"
    with pytest.raises(DataError, match=match):
        other.restore(state)


@pytest.mark.parametrize("change", [{"seed": 1}, {"shuffle": False}])
def test_a_cursor_of_another_order_is_refused(change):
    state = PromptSource(numbered(5), seed=0).state()
    with pytest.raises(DataError, match=f"made with {next(iter(change))} = "):
        PromptSource(numbered(5), **{"seed": 0, **change}).restore(state)


@pytest.mark.parametrize("change", [{"position": 6}, {"position": "1"}, {"epoch": -1}])
def test_a_damaged_cursor_is_refused(change):
    source = PromptSource(numbered(5), seed=0)
    with pytest.raises(DataError, match="cursor is damaged"):
        source.restore({**source.state(), **change})


def test_the_fingerprint_sees_ids_tokens_and_answers():
    base = [{"prompt": "a", "answer": (1, {2: object()})}, {"prompt": "b"}]
    changed = [
        [{"prompt": "a", "answer": (1, {2: object()})}, {"prompt": "c"}],
        [{"prompt": "a", "answer": (1, {2: object()}), "id": 5}, {"prompt": "b", "id": 6}],
        [{"prompt": "a", "answer": (3, {2: object()})}, {"prompt": "b"}],
        base[:1],
    ]
    seen = {fingerprint(prompts_of(rows).prompts) for rows in [base, base, *changed]}
    assert len(seen) == 1 + len(changed)
