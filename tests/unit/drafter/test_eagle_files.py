"""Drafters in the published layout are written and read exactly, or refused with a remedy."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.assembly.drafters import Target, open_drafter
from longtail.drafter.eagle.trainer import DrafterTrainer, TrainerSettings
from longtail.drafter.eagle.unroll import Pairs, unroll
from longtail.drafter.formats.eagle_export import export_drafter, layers_of, to_config
from longtail.drafter.formats.eagle_import import load_published
from longtail.errors import ConfigError
from longtail.model.attention import PackedAttention
from longtail.model.hf.model import read_fields
from longtail.model.hf.weights import SINGLE_FILE, read_tensors
from longtail.model.rope import Rope, RopeConfig
from longtail.rl.packing import lay_out
from longtail.system.tensor_files import save
from support.published import (
    DRAFT_IDS,
    HIDDEN,
    folded,
    our_drafter,
    published_eagle3,
    target_of_six,
)
from support.spot_training import same
from support.tiny_models import tiny_tokenizer


class LayoutReader:
    """An independent reader of the published layout: float64, tensor by tensor.

    It shares no code with `EagleLayer` but the rotary frequencies, and stacks and renames nothing.
    """

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], rope: RopeConfig
    ) -> None:
        self._config = config
        self._tensors = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
        self._prefix = "midlayer" if "norm.weight" in tensors else "layers.0"
        self._rope = Rope(config["head_dim"], rope)

    def read(
        self, features: Tensor, embeddings: Tensor, target_head: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits of the target's tokens after each pair (-inf: not drafted); the output feature."""
        features, embedded = features[:-1], embeddings[1:]
        eagle3 = self._prefix == "midlayer"
        if eagle3:
            features = self._linear("fc", features)
            normed = self._norm(f"{self._prefix}.hidden_norm", features)
            embedded = self._norm(f"{self._prefix}.input_layernorm", embedded)
            residual = normed if self._config.get("norm_before_residual") else features
            attended = torch.cat((embedded, normed), -1)
        else:
            residual = attended = self._linear("fc", torch.cat((embedded, features), -1))
        residual = residual + self._attention(attended)
        inner = self._norm(f"{self._prefix}.post_attention_layernorm", residual)
        gate = F.silu(self._linear(f"{self._prefix}.mlp.gate_proj", inner))
        up = self._linear(f"{self._prefix}.mlp.up_proj", inner)
        feature = residual + self._linear(f"{self._prefix}.mlp.down_proj", gate * up)
        return self._scores(
            self._norm("norm", feature) if eagle3 else feature, target_head
        ), feature

    def _scores(self, scored: Tensor, target_head: Tensor) -> Tensor:
        own = scored @ self._tensors.get("lm_head.weight", target_head).T
        if "d2t" not in self._tensors:
            return own
        scores = own.new_full((len(own), len(target_head)), float("-inf"))
        for draft_id, offset in enumerate(self._tensors["d2t"].tolist()):
            assert self._tensors["t2d"][draft_id + offset], "t2d and d2t name other tokens"
            scores[:, draft_id + offset] = own[:, draft_id]
        return scores

    def _attention(self, x: Tensor) -> Tensor:
        config, length = self._config, len(x)
        dim, heads = config["head_dim"], config["num_attention_heads"]
        groups = heads // config["num_key_value_heads"]
        prefix = f"{self._prefix}.self_attn"
        queries, keys, values = (
            self._linear(f"{prefix}.{name}_proj", x).view(length, -1, dim) for name in "qkv"
        )
        queries, keys = self._rotated(queries), self._rotated(keys)
        back = torch.arange(length)[:, None] - torch.arange(length)
        visible = back >= 0
        if config.get("layer_types") == ["sliding_attention"]:
            visible &= back < config["sliding_window"]
        out = []
        for head in range(heads):
            scores = queries[:, head] @ keys[:, head // groups].T * dim**-0.5
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            out.append(weights @ values[:, head // groups])
        return self._linear(f"{prefix}.o_proj", torch.cat(out, -1))

    def _rotated(self, x: Tensor) -> Tensor:
        rotation = self._rope.rotation(torch.arange(len(x)), torch.float64)
        half = x.shape[-1] // 2
        cos, sin = rotation.cos[..., half:], rotation.sin[..., half:]
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        size = (x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]).sqrt()
        return x / size * self._tensors[f"{name}.weight"]


FORMS: list[dict[str, Any]] = [
    {"recipe": "eagle1"},
    {"recipe": "eagle3"},
    {"recipe": "eagle3", "reduced": True},
    {"recipe": "eagle3", "norm_before_residual": True},
]
KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = tmp_path_factory.mktemp("target")
    return Target(
        model=target_of_six(), tokenizer=tiny_tokenizer(), directory=directory, name="six"
    )


def lay(path, config: dict[str, Any], tensors: dict[str, Tensor]):
    path.mkdir(parents=True, exist_ok=True)
    save(tensors, path / SINGLE_FILE)
    (path / "config.json").write_text(json.dumps(config))
    return path


def load(path, target: Target, **more):
    return load_published(path, "six", target.model, target.tokenizer, **more)


def export(path, target: Target, loaded, dtype=torch.float32):
    return export_drafter(path, loaded, target.model, dtype)


def both_scores(path, loaded, target: Target):
    """Return scores and features of our layer and of the independent reader, of the same text."""
    model, layer, config = target.model, loaded.layer.double(), loaded.layer.config
    layer.config = replace(config, window=config.window if config.recipe == "eagle3" else 0)
    drawn = torch.randint(128, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    text = lay_out([drawn], [1])
    with torch.no_grad():
        _, features = model.forward_with_features(
            text.tokens, text.positions, PackedAttention(text.cu_seqlens), config.taps
        )
        features = features.double()
        embeddings = model.embedding.weight.double()[text.tokens]
        head = model.head.weight.double()
        reader = LayoutReader(read_fields(path).everything(), read_tensors(path), config.shape.rope)
        theirs, feature = reader.read(features, embeddings, head)
        output = unroll(layer, features[:-1], embeddings[1:], Pairs.of(text), 1)[0]
        rows = head if loaded.draft_ids is None else head[loaded.draft_ids]
        rows = rows if loaded.head is None else loaded.head.double()
    return (output.scored @ rows.T, output.feature), (theirs, feature)


@pytest.mark.parametrize("form", FORMS)
def test_an_exported_drafter_is_imported_bit_for_bit(tmp_path, target, form):
    """And an independent reader finds the same scores and features."""
    loaded = export(tmp_path / "d", target, our_drafter(target.model, target.tokenizer, **form))
    again, reduced = load(tmp_path / "d", target), "reduced" in form
    assert again.head is None  # equal to the target's rows, so it is not kept
    assert (None if again.draft_ids is None else again.draft_ids.tolist()) == (
        list(DRAFT_IDS) if reduced else None
    )
    assert replace(again.layer.config, feature_scale=1.0) == loaded.layer.config
    assert same(folded(loaded), folded(again))
    assert [each.name for each in tmp_path.iterdir()] == ["d"]
    (mine, feature), (theirs, their_feature) = both_scores(tmp_path / "d", loaded, target)
    drafted = torch.zeros(128, dtype=torch.bool)
    drafted[list(DRAFT_IDS) if reduced else slice(None)] = True
    assert theirs[:, ~drafted].isneginf().all()
    # Sums of some hundred terms of size 1 in float64, in another order.
    torch.testing.assert_close(theirs[:, drafted], mine, rtol=0, atol=1e-12)
    torch.testing.assert_close(their_feature, feature, rtol=0, atol=1e-12)


def test_an_export_has_the_fields_that_vllm_loads(target):
    def config_of(recipe):
        loaded = our_drafter(target.model, target.tokenizer, recipe)
        return to_config(loaded.layer.config, torch.float32)

    config = config_of("eagle1")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 1)
    assert "sliding_window" not in config  # vLLM ignores it for EAGLE-1
    config = config_of("eagle3")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["sliding_window"], config["layer_types"]) == (16, ["sliding_attention"])
    assert config["eagle_config"][KEY] == [1, 2, 4]


def test_layer_ids_are_read_in_either_convention():
    assert layers_of(None, 32, "auto") == (2, 16, 29)
    assert layers_of([2, 16, 29], 32, "auto") == layers_of([1, 15, 28], 32, "auto") == (2, 16, 29)
    assert layers_of([4, 9, 20], 32, "auto") == layers_of([4, 9, 20], 32, "input") == (4, 9, 20)
    assert layers_of([4, 9, 20], 32, "output") == (5, 10, 21)


@pytest.fixture
def three_taps(tmp_path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = published_eagle3()
    config["eagle_config"] = {KEY: [1, 2, 4]}
    return config, tensors


def test_a_drafter_of_another_shape_and_vocabulary_is_imported_unchanged(
    tmp_path, target, three_taps
):
    config, tensors = three_taps
    path = lay(tmp_path / "p", config, tensors)
    loaded = load(path, target)
    own, shape = loaded.layer.config, loaded.layer.config.shape
    assert (own.recipe, own.layers, own.window) == ("eagle3", (1, 2, 4), 0)
    assert loaded.draft_ids.tolist() == list(DRAFT_IDS)
    assert torch.equal(loaded.head, tensors["lm_head.weight"])
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (2, 1, 8)
    assert (shape.intermediate_size, shape.norm_eps, shape.rope.theta) == (40, 1e-5, 5e5)
    loaded = load(path, target, dtype=torch.float64)
    (mine, _), (theirs, _) = both_scores(path, loaded, target)
    torch.testing.assert_close(theirs[:, list(DRAFT_IDS)], mine, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_an_imported_drafter_drafts_trains_saves_and_exports(tmp_path, target, three_taps):
    path = lay(tmp_path / "p", *three_taps)
    drafter = open_drafter(str(path), target)
    assert drafter.taps.layers == (1, 2, 4)
    loaded = load(path, target, dtype=torch.float32)
    before = loaded.head.clone()
    trainer = DrafterTrainer(
        loaded.layer, target.model, TrainerSettings(unroll_steps=2),
        draft_ids=loaded.draft_ids, head=loaded.head,
    )  # fmt: skip
    texts = [lay_out([tuple(range(5, 60)), tuple(range(90, 60, -1))], [3, 3])]
    losses = [trainer.step(texts).loss for _ in range(4)]
    assert losses[-1] < losses[0]
    assert torch.equal(loaded.head, before)  # its head is never trained
    loaded.save(tmp_path / "ours")
    again = open_drafter(str(tmp_path / "ours"), target)
    assert again.taps == drafter.taps
    export(tmp_path / "out", target, load(path, target, dtype=torch.float32))
    assert torch.equal(read_tensors(tmp_path / "out")["lm_head.weight"], before.float())


def test_zero_biases_and_derived_tables_are_ignored_and_a_window_is_not(
    tmp_path, target, three_taps
):
    config, tensors = three_taps
    tensors = {**tensors, "fc.bias": torch.zeros(HIDDEN)}
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    config |= {"layer_types": ["sliding_attention"], "sliding_window": 40}
    assert load(lay(tmp_path / "p", config, tensors), target).layer.config.window == 40


Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, t: t.update({"fc.bias": torch.ones(HIDDEN)}), "holds 'fc.bias', .*not wanted"),
        (
            lambda c, t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}),
            "holds 'layers.0.self_attn.q_norm.weight'",
        ),
        (lambda c, t: t.pop("norm.weight"), "lacks norm.weight"),
        (lambda c, t: c.update(num_key_value_heads=2), r"k_proj.weight is .*\[8, 64\]"),
        (lambda c, t: c.update(intermediate_size=48), r"mlp.* is bfloat16 .*40.*wanted is .*48"),
        (lambda c, t: c.update(hidden_size=64), "hidden_size = 64, the target has 32"),
        (lambda c, t: c.update(num_hidden_layers=2), "num_hidden_layers = 2: .*one layer"),
        (lambda c, t: c.update(speculators_model_type="eagle3"), "the library speculators"),
        (lambda c, t: c.update(norm_before_fc=True), "norm_before_fc = true"),
        (lambda c, t: t.update(d2t=t["d2t"] + 100), "d2t holds the token 200, of 128"),
        (lambda c, t: c.update(longtail={"layers": [1, 2, 10**9]}), "must be layers of the target"),
        (lambda c, t: t.update(t2d=~t["t2d"]), "t2d and d2t name other tokens"),
        (lambda c, t: (t.pop("d2t"), t.pop("t2d")), "there is no d2t"),
        (
            lambda c, t: c.update(eagle_config={KEY: [1, 2, 9]}),
            r"layer_ids = \[1, 2, 9\]: they must be layers of the target, which has 6",
        ),
        (
            lambda c, t: c.update(eagle_config={KEY: [1, 2]}),
            r"fc.weight is bfloat16 of shape \[32, 96\], .*\[32, 64\]",
        ),
        (
            lambda c, t: t.update({"embed_tokens.weight": torch.ones(128, HIDDEN)}),
            "embed_tokens.weight is not the target's embedding",
        ),
        (
            lambda c, t: t.update({"lm_head.weight": torch.ones(5, HIDDEN)}),
            r"lm_head.weight is .*\[5, 32\], wanted",
        ),
    ],
)
def test_a_misfit_is_refused_by_name(tmp_path, target, three_taps, change: Change, message: str):
    config, tensors = three_taps
    change(config, tensors)
    with pytest.raises(ConfigError, match=message):
        load(lay(tmp_path / "p", config, tensors), target)


def test_an_eagle1_drafter_must_have_the_targets_head(tmp_path, target):
    made = our_drafter(target.model, target.tokenizer, "eagle1")
    export(tmp_path / "d", target, made)
    config, kept = read_fields(tmp_path / "d").everything(), read_tensors(tmp_path / "d")
    kept["lm_head.weight"] = target.model.head.weight.detach()
    assert load(lay(tmp_path / "p", config, kept), target).head is None
    kept["lm_head.weight"] = -kept["lm_head.weight"]
    with pytest.raises(ConfigError, match=r"lm_head.weight is not the target's"):
        load(lay(tmp_path / "p", config, kept), target)
