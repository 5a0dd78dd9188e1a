"""Configurations, options, models' config.json and chat templates: a value, or ConfigError."""

import contextlib
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from longtail.config import files
from longtail.config.drafter import DrafterTrainConfig
from longtail.config.rl import RunConfig
from longtail.config.sft import SftConfig
from longtail.errors import ConfigError, DataError, NonFiniteError
from longtail.model.hf.model import load_config, load_model
from longtail.model.hf.tokenizer import load_tokenizer
from support.tiny_models import save_tiny

MODELS: tuple[type[BaseModel], ...] = (RunConfig, SftConfig, DrafterTrainConfig)
models = st.sampled_from(MODELS)
names = st.sampled_from(sorted({name for model in MODELS for name in files.fields_of(model)}))
scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    st.sampled_from([2**31, 2**63, 10**400, 1e-320, "auto", "none", "true", "\0", "x" * 5000, "["]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


def _resolve(model: type[BaseModel], text: bytes, words: list[str]) -> None:
    """Read a configuration; one that is accepted is the same when it is written and read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_bytes(text)
        try:
            config = files.resolve(model, path, words)
        except ConfigError:
            return
        path.write_text(files.render(config), encoding="utf-8")
        assert files.resolve(model, path, []) == config


bytes_ = st.binary(max_size=60) | st.text(max_size=60).map(str.encode)
deep = st.tuples(st.sampled_from(["[", "{a=", "9", "a."]), st.integers(1, 20_000)).map(
    lambda drawn: f"[run]\nsteps = {drawn[0] * drawn[1]}".encode()
)
options = st.tuples(
    names | st.text(max_size=9),
    scalars.map(str) | values.map(lambda value: json.dumps(value, default=str)),
).map(lambda pair: f"--{pair[0]}={pair[1]}")


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """Values of any fields, as far as TOML can say them."""
    table: dict[str, Any] = {}
    for name, value in draw(st.dictionaries(names | st.text(max_size=9), values)).items():
        section, _, key = name.partition(".")
        table.setdefault(section, {})[key] = value
    try:
        return tomli_w.dumps(table).encode()
    except (TypeError, ValueError, AttributeError):
        return b""


@pytest.mark.slow
@example(DrafterTrainConfig, b"", ["--drafter.init=d"])
@given(models, bytes_ | deep | tables(), st.lists(options | st.text(max_size=9), max_size=4))
def test_any_file_and_options_are_a_configuration_or_refused(model, text, words):
    _resolve(model, text, [])
    with contextlib.suppress(SystemExit):  # of -h
        _resolve(model, b"", words)


@functools.cache
def _model() -> tuple[tempfile.TemporaryDirectory[str], Path, dict[str, Any]]:
    """A tiny model on disk, kept as long as the process lives, and its configuration."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name)
    save_tiny(path)
    return folder, path, json.loads((path / "config.json").read_text())


changes = st.dictionaries(st.sampled_from(sorted(_model()[2])), values, min_size=1, max_size=3)
ropes = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "llama3", "yarn"]) | scalars},
    optional={name: scalars for name in ("factor", "low_freq_factor", "beta_fast", "rope_theta")},
)


@pytest.mark.slow
@given(
    changes | ropes.map(lambda rope: {"rope_scaling": rope, "rope_parameters": rope}),
    st.none() | st.binary(max_size=40) | st.text('[{"a:,1', max_size=40).map(str.encode),
)
def test_a_model_with_any_configuration_is_loaded_or_refused(changed, text):
    _, path, content = _model()
    described = json.dumps({**content, **changed}, default=str).encode()
    (path / "config.json").write_bytes(described if text is None else text)
    with contextlib.suppress(ConfigError, NonFiniteError):
        load_config(path)
        load_model(path)


pieces = st.sampled_from(
    [
        *("{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ 1 / 0 }}", "{{ x }}"),
        *("{{ messages[9] }}", "{% if 1 %}", "{% endif %}", "{%", "{{ raise_exception('no') }}"),
        *("{{ m.content + 1 }}", "{{ m.__class__ }}", "{{ 'a'.join(m) }}", "{{ m.content[5:] }}"),
        *(
            "{{ m.role }}",
            "{{ m | tojson }}",
            "{{ m.content | trim }}",
            "{% if tools %}",
            "<think>\n",
        ),
    ]
)
CHATS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "human", "gpt", "assistant", "system", "developer"]),
            "content": st.text(max_size=5) | st.sampled_from(['two\n"2"', "<think>a</think>b"]),
        },
        optional={"tool_calls": st.sampled_from([[], [{"name": "add", "arguments": "{"}]])},
    ),
    max_size=4,
)
WHOLE = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}"


@pytest.mark.slow
@given(
    st.just(WHOLE) | st.lists(pieces | st.text("{}% ", max_size=5), max_size=6).map("".join), CHATS
)
def test_any_chat_is_rendered_by_any_template_without_a_loss_or_refused(template, chat):
    _, path, content = _model()
    (path / "config.json").write_text(json.dumps(content))  # the test above leaves any text
    (path / "chat_template.jinja").write_text(template)
    with contextlib.suppress(DataError):
        text = load_tokenizer(path).template.render(chat)
        for message in chat:
            own = message["content"].rpartition("</think>")[2].strip()
            assert own in text or json.dumps(own, ensure_ascii=False)[1:-1] in text
