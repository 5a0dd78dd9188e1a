"""Any bytes in a data file give examples or the documented error with the name of the file."""

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from longtail.errors import ConfigError, DataError
from longtail.model.hf.ends import Ends
from longtail.rl.data.examples import make_examples
from longtail.rl.data.prompts import Encoder, PromptSource, make_prompts
from longtail.rl.data.sources import Row, load_rows
from longtail.rl.grading.pool import gradable
from longtail.rl.grading.reward import Grader
from longtail.system.files import find_surrogate

ENDS = Ends(ids=(0,), turn="", turn_id=None, special={})
COLUMNS = st.sampled_from(
    [
        *("prompt", "question", "answer", "completion", "messages", "text", "id", "reward_model"),
        *("conversations", "instruction", "input", "output", "system", "tools", "context", "x"),
    ]
)
TEXTS = st.one_of(st.text(max_size=20), st.just("\ud83d"), st.just("####"), st.just("\\boxed{}"))
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    TEXTS,
    st.sampled_from([10**300, 10**4000, -1e308]),
)
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "from", "value", "x"]),
        TEXTS | st.sampled_from(["human", "gpt", "user", "assistant"]),
        max_size=3,
    ),
    max_size=3,
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(COLUMNS, st.one_of(TEXTS, MESSAGES, VALUES)), max_size=4)
DEEP = st.integers(1, 20_000).map(lambda depth: b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}")
EXTREME = st.one_of(
    DEEP,
    st.integers(1, 6_000).map(lambda digits: b'{"prompt": "a", "answer": ' + b"9" * digits + b"}"),
    st.sampled_from([b"\xff", b"\xef\xbb\xbf{}", b"\0", b'{"prompt": "\xed\xa0\xbd"}', b"[]", b""]),
)
CUTS = st.tuples(st.integers(0, 1 << 16), st.integers(0, 8), st.binary(max_size=8))
"""Position and number of bytes that are cut out of a file, and their replacement."""


def mutated(data: bytes, cuts: Sequence[tuple[int, int, bytes]]) -> bytes:
    for place, length, instead in cuts:
        start = place % (len(data) + 1)
        data = data[:start] + instead + data[start + length :]
    return data


def encode(text: str, **_: bool) -> list[int]:
    """Stand in for a tokenizer: the door at which lone surrogates are refused is the same."""
    if find_surrogate(text) is not None:
        raise DataError("a text holds half of a surrogate pair")
    return list(text.encode())


def render(messages: list[dict[str, Any]], tools: list[Any] | None = None, **_: bool) -> str:
    assert all(
        isinstance(message[name], str) for message in messages for name in ("role", "content")
    )
    return f"{tools}" + "".join(f"<{message['role']}>{message['content']}" for message in messages)


def use(rows: list[Row], source: str) -> None:
    """Take rows through all that reads them; DataError is an answer, too."""
    for encoder in (Encoder(encode=encode, render=None), Encoder(encode=encode, render=render)):
        told(partial(train_on, rows, source, encoder), "data.")
        told(partial(imitate, rows, source, encoder), "data.")


def train_on(rows: list[Row], source: str, encoder: Encoder) -> None:
    prompts = make_prompts(rows, source=source, encoder=encoder, max_prompt_len=64, drop_long=True)
    assert len(prompts.prompts) == len(prompts.rows) == len(rows) - prompts.num_dropped
    assert PromptSource(prompts, seed=0).take(1)[0].prompt in prompts.prompts
    for prompt in gradable(prompts, "exact", Grader("exact").check, drop=True).prompts:
        answer = prompt.data["answer"]
        assert not isinstance(answer, float) or math.isfinite(answer)


def imitate(rows: list[Row], source: str, encoder: Encoder) -> None:
    examples, _ = make_examples(rows, source=source, encoder=encoder, ends=ENDS, max_len=64)
    assert all(0 < each.prompt_len < len(each.tokens) for each in examples)


def told(read: Callable[[], object], *names: str) -> None:
    """Read; an error must be one line that names one of `names` and can be printed."""
    said = None
    try:
        read()
    except ConfigError as error:
        said = str(error)
    if said is not None:
        assert any(name in said for name in names)
        assert "\n" not in said
        assert find_surrogate(said) is None


def read_file(name: str, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / name
        path.write_bytes(data)
        told(lambda: use(load_rows(str(path), 4, 0), str(path)), name, "data.")


@pytest.mark.slow
@given(ROWS, st.lists(EXTREME, max_size=3), st.binary(max_size=50), st.lists(CUTS, max_size=2))
def test_any_lines_are_examples_or_one_sentence(rows, lines, tail, cuts):
    good = [json.dumps(row, ensure_ascii=True).encode() for row in rows]
    read_file("rows.jsonl", mutated(b"\n".join(good), cuts[:1]))
    read_file("rows.jsonl", mutated(b"\n".join([*good, *lines, tail]), cuts))
