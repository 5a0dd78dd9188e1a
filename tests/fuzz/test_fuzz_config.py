"""Configurations, run files, words of a command line, models' config.json and chat templates.

Whatever comes in: a value, or the documented error.
"""

import contextlib
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from longtail.config import files as configfile
from longtail.config.drafter import DrafterTrainConfig
from longtail.config.rl import RunConfig
from longtail.config.sft import SftConfig
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.drafter.formats.checkpoint import TrainingRecord, identity, load_drafter, save_drafter
from longtail.errors import ConfigError, DataError, NonFiniteError
from longtail.model.hf.model import load_config, load_model, save_model
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from support.tiny_models import tiny_model, tiny_tokenizer

MODELS: tuple[type[BaseModel], ...] = (RunConfig, SftConfig, DrafterTrainConfig)
NAMES = sorted({name for model in MODELS for name in configfile.fields_of(model)})
NUMBERS = (0, -1, 1, 2, 3, 7, 64, 2**31, 2**63, 10**12, 10**400, 0.5, 1e-320, 1e308, -0.0)
TEXTS = ("", "auto", "cuda:99999999999999999999", "none", "true", "\x00", "x" * 5000, "[", "[1,")

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.integers(),
    st.floats(),
    st.sampled_from(TEXTS),
    st.text(max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


def _resolve(model: type[BaseModel], text: bytes | None, words: list[str]) -> None:
    """Read a configuration; one that is accepted is the same when it is written and read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_bytes(text or b"")
        try:
            config = configfile.resolve(model, None if text is None else path, words)
        except ConfigError:
            return
        path.write_text(configfile.render(config), encoding="utf-8")
        assert configfile.resolve(model, path, []) == config


@pytest.mark.slow
@given(st.sampled_from(MODELS), st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_a_run_file_or_refused(model: type[BaseModel], text: bytes) -> None:
    _resolve(model, text, [])


@given(st.sampled_from(MODELS), st.integers(1, 20_000), st.sampled_from(["[", "{a=", "9", "a."]))
def test_a_run_file_of_any_depth_or_length_is_read_or_refused(
    model: type[BaseModel], times: int, piece: str
) -> None:
    _resolve(model, f"[run]\nsteps = {piece * times}".encode(), [])


@pytest.mark.slow
@given(
    st.sampled_from(MODELS),
    st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=9), values, min_size=1, max_size=4),
)
def test_any_value_of_any_field_is_accepted_or_refused(
    model: type[BaseModel], fields: dict[str, Any]
) -> None:
    table: dict[str, Any] = {}
    for name, value in fields.items():
        section, _, key = name.partition(".")
        table.setdefault(section, {})[key] = value
    try:
        text = tomli_w.dumps(table).encode()
    except (TypeError, ValueError, AttributeError):  # TOML cannot say it
        return
    _resolve(model, text, [])


@given(
    st.sampled_from(MODELS),
    st.lists(
        st.tuples(
            st.sampled_from(NAMES) | st.text(max_size=9),
            st.sampled_from(TEXTS)
            | scalars.map(str)
            | st.text(max_size=9)
            | values.map(lambda value: json.dumps(value, default=str))
            | st.text(st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF), max_size=2),
        ).map(lambda pair: f"--{pair[0]}={pair[1]}")
        | st.text(max_size=9),
        max_size=4,
    ),
)
def test_any_words_are_a_configuration_or_refused(model: type[BaseModel], words: list[str]) -> None:
    _resolve(model, None, words)


@functools.cache
def _model() -> tuple[tempfile.TemporaryDirectory[str], Path, dict[str, Any]]:
    """A tiny model on disk, kept as long as the process lives, and its configuration."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name)
    save_model(tiny_model(), path)
    return folder, path, json.loads((path / "config.json").read_text())


ROPE = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale")
KEYS = st.sampled_from(
    [
        *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size"),
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling"),
        *("rope_parameters", "tie_word_embeddings", "sliding_window", "use_sliding_window"),
        *("layer_types", "max_window_layers", "attention_bias", "mlp_bias", "torch_dtype"),
        *("dtype", "quantization_config", "partial_rotary_factor"),
    ]
)
ropes = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "llama3", "yarn"]) | scalars},
    optional={
        name: st.sampled_from(NUMBERS) | st.floats(0.5, 64.0) | scalars
        for name in (*ROPE, "rope_theta", "original_max_position_embeddings", "mscale_all_dim")
    },
)
families = st.sampled_from(
    ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)


@pytest.mark.slow
@given(
    families.map(lambda name: {"architectures": [name]}) | st.just({}),
    st.dictionaries(KEYS, values, max_size=3)
    | ropes.map(lambda rope: {"rope_scaling": rope})
    | ropes.map(lambda rope: {"rope_parameters": rope}),
)
def test_a_model_with_any_configuration_is_loaded_or_refused(
    family: dict[str, Any], changes: dict[str, Any]
) -> None:
    _, path, content = _model()
    (path / "config.json").write_text(json.dumps({**content, **family, **changes}, default=str))
    try:
        model = load_model(path)
    except (ConfigError, NonFiniteError):
        return
    assert model.config.vocab_size == content["vocab_size"]


@given(st.binary(max_size=40) | st.text('[{"a:,1', max_size=40).map(str.encode))
def test_any_bytes_are_a_models_configuration_or_refused(text: bytes) -> None:
    _, path, _ = _model()
    (path / "config.json").write_bytes(text)
    with contextlib.suppress(ConfigError):
        load_config(path)


@functools.cache
def _drafter() -> tuple[tempfile.TemporaryDirectory[str], Path, dict[str, Any]]:
    """A drafter of the tiny model on disk, and its description."""
    folder, target, tokenizer = tempfile.TemporaryDirectory(), tiny_model(), _tokenizer()
    path = Path(folder.name, "drafter")
    layer = EagleLayer(EagleConfig(recipe="eagle1", target=target.config, window=8))
    layer.initialize(torch.Generator().manual_seed(0))
    record = TrainingRecord(steps=0, tokens=0, unroll_steps=2)
    save_drafter(path, layer, None, identity("tiny", target, tokenizer), record)
    return folder, path, json.loads((path / "drafter.json").read_text())


shapes = st.fixed_dictionaries(
    {},
    optional={
        name: st.sampled_from([1, 2, 10**9, 2**40, 0, -1, "x"])
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    },
)
DESCRIBED = ("recipe", "layers", "window", "draft_vocab_size", "feature_scale", "own_shape")


@pytest.mark.slow
@given(
    st.dictionaries(
        st.sampled_from([*DESCRIBED, "format", "target", "training"]),
        values | st.sampled_from(["eagle1", "eagle3", [1, 2, 3]]) | shapes,
        max_size=3,
    ),
    shapes,
)
def test_a_drafter_with_any_description_is_loaded_or_refused(
    changes: dict[str, Any], own: dict[str, Any]
) -> None:
    _, path, content = _drafter()
    described = {**content, **changes}
    if own:
        described["own_shape"] = {**content["target"]["shape"], **own}
    (path / "drafter.json").write_text(json.dumps(described, default=str))
    with contextlib.suppress(ConfigError):
        load_drafter(path, tiny_model(), _tokenizer(), strict_weights=False)


PIECES = st.sampled_from(
    [
        *("{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ 1 / 0 }}", "{{ x }}"),
        *("{% for i in range(999) %}", "{{ messages[9] }}", "{% if 1 %}", "{% endif %}", "{%"),
        *("{% macro f(n) %}", "{{ f(1) }}", "{% endmacro %}", "{% set a = a ~ 'b' %}", "}}", "{{"),
        *("{{ raise_exception('no') }}", "{{ 9 ** 9 }}", "{{ m | tojson }}", "{% break %}"),
        *("{{ m.content + 1 }}", "{{ m.__class__ }}", "{{ 'a'.join(m) }}", "{{ m.content[5:] }}"),
    ]
)


@pytest.mark.slow
@given(st.lists(PIECES | st.text("{}% ", max_size=5), max_size=6).map("".join))
def test_any_chat_template_is_rendered_or_refused(template: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _tokenizer().save(folder)
        Path(folder, "chat_template.jinja").write_text(template)
        with contextlib.suppress(DataError):
            load_tokenizer(folder).render([{"role": "user", "content": "two and two"}])


@functools.cache
def _tokenizer() -> Tokenizer:
    return tiny_tokenizer()
