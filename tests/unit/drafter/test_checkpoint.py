"""Drafter directories: own tensors only, atomic writes, checks against the target."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from longtail.drafter.eagle.layer import Recipe
from longtail.drafter.formats.checkpoint import (
    LoadedDrafter,
    identity,
    is_drafter,
    load_drafter,
    target_name,
    weights_digest,
)
from longtail.errors import ConfigError
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.transformer import Transformer
from longtail.system import tensor_files
from support.published import DRAFT_IDS, our_drafter
from support.tiny_models import tiny_config, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def _save(
    path: Path, tokenizer: Tokenizer, recipe: Recipe = "eagle3", *, reduced: bool = False
) -> tuple[Transformer, LoadedDrafter]:
    target = tiny_model()
    made = our_drafter(target, tokenizer, recipe, reduced=reduced, layers=(0, 1))
    made.save(path)
    return target, made


@pytest.mark.parametrize(("recipe", "reduced"), [("eagle1", False), ("eagle3", True)])
def test_a_saved_drafter_is_loaded_equal(tmp_path, tokenizer, recipe, reduced):
    target, made = _save(tmp_path / "d", tokenizer, recipe, reduced=reduced)
    loaded = load_drafter(tmp_path / "d", target, tokenizer, strict_weights=True)
    assert loaded.layer.config == made.layer.config
    assert loaded.draft_ids is None or loaded.draft_ids.tolist() == list(DRAFT_IDS)
    assert (loaded.draft_ids is not None) == reduced
    assert loaded.training == made.training
    assert loaded.trained_on == identity("here", target, tokenizer)
    own = dict(made.layer.named_parameters())
    for name, parameter in loaded.layer.named_parameters():
        assert torch.equal(own[name], parameter)
    with safe_open(tmp_path / "d" / "drafter.safetensors", framework="pt") as file:
        assert set(file.keys()) - {"draft_ids"} == own.keys(), "no embedding, no head"
    assert is_drafter(tmp_path / "d")
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3}, r"num_layers = 2; this target has num_layers = 3: give .*train one"),
        ({"qk_norm": False}, "qk_norm = True; this target has qk_norm = False"),
    ],
)
def test_a_target_of_another_shape_is_refused_by_field(tmp_path, tokenizer, change, message):
    _save(tmp_path / "d", tokenizer)
    other = Transformer(replace(tiny_config(), **change))
    with pytest.raises(ConfigError, match=message):
        load_drafter(tmp_path / "d", other, tokenizer, strict_weights=False)


def test_a_drafter_of_older_weights_is_accepted_unless_weights_are_strict(tmp_path, tokenizer):
    target, _ = _save(tmp_path / "d", tokenizer)
    with torch.no_grad():
        target.layers[1].feed_forward.down.weight.mul_(1.1)
    loaded = load_drafter(tmp_path / "d", target, tokenizer, strict_weights=False)
    assert loaded.trained_on.weights != weights_digest(target)
    with pytest.raises(ConfigError, match=r"with weights = .* this target has weights ="):
        load_drafter(tmp_path / "d", target, tokenizer, strict_weights=True)


def test_the_dtype_in_which_a_target_is_loaded_does_not_matter():
    target = tiny_model()
    digest = weights_digest(target)
    assert weights_digest(target.to(torch.bfloat16)) == digest
    assert weights_digest(tiny_model(seed=1)) != digest


def _describe(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    described = json.loads((path / "drafter.json").read_text())
    change(described)
    (path / "drafter.json").write_text(json.dumps(described))


def _give_a_huge_shape(described: dict[str, Any]) -> None:
    """Its tensors do not match, which is found before memory is allocated."""
    described["own_shape"] = described["target"]["shape"] | {"intermediate_size": 10**8}


ALTERED = {
    "target": ([1], {"shape": 3}), "training": ("none",), "recipe": ("eagle9",),
    "layers": (3, [10**12]), "window": (-1,), "draft_vocab_size": (0.5,), "feature_scale": (0,),
    "own_shape": ({"windows": []},),
}  # fmt: skip
"""Fields of a description, and values that they cannot have."""


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: d.rename(d.with_name("e")), "is not a directory: .*longtail drafter train"),
        (lambda d: (d / "drafter.json").unlink(), "holds no drafter.json"),
        (lambda d: (d / "drafter.json").write_text("{"), r"drafter\.json is not JSON"),
        (lambda d: (d / "drafter.json").write_text('{"format": 1}'), "malformed"),
        (lambda d: (d / "drafter.json").write_text('{"format": 9}'), "format 9, known is 1"),
        (lambda d: (d / "drafter.safetensors").write_bytes(b"x"), "not a readable safetensors"),
        (lambda d: (d / "drafter.safetensors").unlink(), "not a readable safetensors"),
        (
            lambda d: _describe(d, lambda it: it["target"].update(tokenizer="0" * 16)),
            "trained on here, with tokenizer = .0000",
        ),
        (lambda d: _describe(d, _give_a_huge_shape), "feed_forward.* wanted is .*100000000"),
        *(
            (
                lambda d, altered={field: value}: _describe(d, lambda it: it.update(altered)),
                r"drafter\.json is malformed .*longtail drafter train",
            )
            for field, values in ALTERED.items()
            for value in values
        ),
    ],
)
def test_a_damaged_drafter_is_refused_by_name(tmp_path, tokenizer, spoil, message):
    target, _ = _save(tmp_path / "d", tokenizer)
    spoil(tmp_path / "d")
    with pytest.raises(ConfigError, match=message):
        load_drafter(tmp_path / "d", target, tokenizer, strict_weights=False)


WEIGHT = "fc.weight"
IDS = torch.tensor(DRAFT_IDS)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("draft_ids", lambda t: t.int(), "draft_ids is int32 of shape .6., wanted is int64"),
        ("draft_ids", lambda t: t + 50, "draft_ids holds the token 150, of 128 tokens"),
        ("draft_ids", lambda t: t * 0, "draft_ids holds a token twice"),
        (WEIGHT, lambda t: t[None], r"fc\.weight is float32 of shape \[1, "),
        (WEIGHT, lambda t: t / 0, r"fc\.weight holds \d+ values that are NaN or infinite"),
        ("head", lambda t: t[1:], r"head is float32 of shape \[5, 32\]"),
        ("sums/steps", lambda t: torch.ones(64), "holds 'sums/steps', .* which is not wanted"),
    ],
)
def test_a_tensor_that_no_kernel_may_see_is_refused(tmp_path, tokenizer, name, change, message):
    path = tmp_path / "d"
    target, _ = _save(path, tokenizer, reduced=True)
    tensors = tensor_files.read(path / "drafter.safetensors")
    tensors["head"] = target.head.weight.detach()[IDS]
    tensors[name] = change(tensors.get(name, IDS))
    tensor_files.save(tensors, path / "drafter.safetensors")
    with pytest.raises(ConfigError, match=rf"drafter\.safetensors.*{message}.*drafter train"):
        load_drafter(path, target, tokenizer, strict_weights=False)


def test_what_a_file_says_is_printed_without_what_a_terminal_obeys(tmp_path, tokenizer):
    target, _ = _save(tmp_path / "d", tokenizer)
    evil = {"name": "\x1b]0;x\x07\u202e", "tokenizer": "\x1b[2J"}
    _describe(tmp_path / "d", lambda it: it["target"].update(evil))
    with pytest.raises(ConfigError) as error:
        load_drafter(tmp_path / "d", target, tokenizer, strict_weights=False)
    assert str(error.value).isprintable()
    assert r"\x1b[2J" in str(error.value)
    assert target_name(tmp_path / "d") == r"\x1b]0;x\x07\u202e"
