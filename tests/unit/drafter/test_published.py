"""Published drafters are imported exactly, or refused by the tensor that does not fit."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longtail.assembly.drafters import Target, at_work, open_drafters
from longtail.drafter.eagle.unroll import Pairs, unroll
from longtail.drafter.formats.layout_reader import LayoutReader
from longtail.drafter.formats.published import ImportOptions, load_published, translate
from longtail.drafter.training.trainer import DrafterTrainer, TrainerSettings
from longtail.errors import ConfigError
from longtail.model.attention import PackedAttention
from longtail.model.hf.weights import read_tensors, write_tensors
from longtail.programs.drafter_export import self_check, write_layout
from longtail.rl.packing import lay_out
from support.published import DRAFT_IDS, HIDDEN, fields, published_eagle3, target_of_six
from support.tiny_models import tiny_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = tmp_path_factory.mktemp("target")
    return Target(
        model=target_of_six(), tokenizer=tiny_tokenizer(), directory=directory, name="six"
    )


def lay(path, config: dict[str, Any], tensors: dict[str, Tensor]):
    path.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, path)
    (path / "config.json").write_text(json.dumps(config))
    return path


def load(path, target: Target, **more):
    return load_published(path, "six", target.model, target.tokenizer, **more)


@pytest.fixture
def three_taps(tmp_path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = published_eagle3()
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    return config, tensors


def test_a_drafter_of_another_shape_and_vocabulary_is_imported_unchanged(
    tmp_path, target, three_taps
):
    config, tensors = three_taps
    loaded = load(lay(tmp_path / "p", config, tensors), target)
    own = loaded.layer.config
    assert own.recipe == "eagle3"
    assert own.layers == (1, 2, 4)
    assert loaded.draft_ids.tolist() == list(DRAFT_IDS)
    assert torch.equal(loaded.head, tensors["lm_head.weight"])
    shape = own.shape
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (2, 1, 8)
    assert (shape.intermediate_size, shape.norm_eps, shape.rope.theta) == (40, 1e-5, 5e5)


def test_an_imported_drafter_scores_like_an_independent_reader(tmp_path, target, three_taps):
    config, tensors = three_taps
    loaded = load(lay(tmp_path / "p", config, tensors), target, dtype=torch.float64)
    text = lay_out([tuple(range(5, 45))], [1])
    model = target.model
    with torch.no_grad():
        taps = loaded.layer.config.taps
        tapped = model.forward_with_features(
            text.tokens, text.positions, PackedAttention(text.cu_seqlens), taps
        )
        features = tapped.features.double()
        embeddings = model.embedding.weight.double()[text.tokens]
        layer = loaded.layer
        theirs, _ = LayoutReader(config, tensors, layer.config.shape.rope).read(
            features, embeddings, model.head.weight.double()
        )
        pairs = Pairs.of(text)
        mine = unroll(layer, features[:-1], embeddings[1:], pairs, 1)[0].scored
        mine = mine @ loaded.head.double().T
    torch.testing.assert_close(theirs[:, list(DRAFT_IDS)], mine, rtol=0, atol=1e-12)


def test_the_scale_is_moved_by_a_power_of_two_without_loss(tmp_path, target, three_taps):
    config, tensors = three_taps
    loaded = load(lay(tmp_path / "p", config, tensors), target)
    scale = torch.tensor(loaded.layer.config.feature_scale)
    assert torch.frexp(scale).mantissa == 0.5
    loaded.layer.fold()
    assert torch.equal(loaded.layer.fc.weight, tensors["fc.weight"])


@pytest.mark.slow
def test_an_imported_drafter_drafts_trains_saves_and_exports(tmp_path, target, three_taps):
    path = lay(tmp_path / "p", *three_taps)
    (drafter,) = open_drafters([str(path)], target, print)
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
    (again,) = open_drafters([str(tmp_path / "ours")], target, print)
    assert again.taps == drafter.taps
    for layout in ("vllm", "sglang"):
        out = load(path, target, dtype=torch.float32)
        out.layer.fold()
        place = tmp_path / layout
        write_layout(place, layout, out, target, verifier="six", depth=3)
        assert self_check(place, out, target, [tuple(range(5, 30))], 16).score_error < 1e-12
        kept = read_tensors(place)
        assert torch.equal(kept["lm_head.weight"], before.float())


def test_speculators_norm_before_the_residual_unless_the_config_differs(
    tmp_path, target, three_taps
):
    config, tensors = three_taps
    inner = {k: v for k, v in config.items() if k not in ("eagle_config", "draft_vocab_size")}
    outer = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(DRAFT_IDS),
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "transformer_layer_config": inner,
    }
    renamed = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    renamed["embed_tokens.weight"] = target.model.embedding.weight.detach().to(torch.bfloat16)
    usual = load(lay(tmp_path / "s", outer, renamed), target)
    assert usual.layer.config.norm_before_residual
    plain = load(lay(tmp_path / "t", {**outer, "norm_before_residual": False}, renamed), target)
    assert plain.layer.config == load(lay(tmp_path / "p", *three_taps), target).layer.config
    at_work(replace(usual, head=usual.head.float()), target)


def test_zero_biases_and_derived_tables_are_ignored(tmp_path, target, three_taps):
    config, tensors = three_taps
    tensors = {**tensors, "fc.bias": torch.zeros(HIDDEN)}
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    assert load(lay(tmp_path / "p", config, tensors), target).draft_ids is not None


Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, t: t.update({"fc.bias": torch.ones(HIDDEN)}), "the tensor fc.bias: .*no place"),
        (
            lambda c, t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}),
            "the tensor layers.0.self_attn.q_norm.weight",
        ),
        (lambda c, t: t.pop("norm.weight"), "norm.weight has shape None"),
        (lambda c, t: c.update(num_key_value_heads=2), r"k_proj.weight has shape \[8, 64\].*\[16"),
        (lambda c, t: c.update(intermediate_size=48), r"gate_proj.weight has shape \[40, 32\]"),
        (lambda c, t: c.update(hidden_size=64), "hidden_size = 64, the target has 32"),
        (lambda c, t: c.update(vocab_size=99), "vocab_size = 99, the target has 128"),
        (lambda c, t: c.update(num_hidden_layers=2), "num_hidden_layers = 2: .*one layer"),
        (lambda c, t: c.update(norm_before_fc=True), "norm_before_fc = true"),
        (lambda c, t: c.update(draft_vocab_size=9), "d2t names 6 tokens, draft_vocab_size is 9"),
        (lambda c, t: t.update(d2t=t["d2t"] + 100), "d2t names 6 tokens"),
        (lambda c, t: t.update(t2d=~t["t2d"]), "t2d and d2t name other tokens"),
        (lambda c, t: (t.pop("d2t"), t.pop("t2d")), "there is no d2t"),
        (
            lambda c, t: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}),
            r"layer_ids = \[1, 2, 9\]: they must be layers of the target, which has 6",
        ),
        (
            lambda c, t: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]}),
            r"fc.weight has shape \[32, 96\], .*\[32, 64\]",
        ),
        (
            lambda c, t: t.update({"embed_tokens.weight": torch.ones(128, HIDDEN)}),
            "embed_tokens.weight is not the target's embedding",
        ),
        (lambda c, t: t.update({"lm_head.weight": torch.ones(5, HIDDEN)}), "lm_head.weight has"),
    ],
)
def test_a_misfit_is_refused_by_name(tmp_path, target, three_taps, change: Change, message: str):
    config, tensors = three_taps
    change(config, tensors)
    with pytest.raises(ConfigError, match=message):
        load(lay(tmp_path / "p", config, tensors), target)


def test_an_eagle1_drafter_must_have_the_targets_head(tmp_path, target):
    config, tensors = published_eagle3()
    del config["draft_vocab_size"]
    width = HIDDEN
    for letter in "qkv":
        name = f"midlayer.self_attn.{letter}_proj.weight"
        tensors[name] = tensors[name][:, :width]
    tensors["fc.weight"] = tensors["fc.weight"][:, : 2 * width]
    gone = ("norm.weight", "d2t", "t2d", "midlayer.hidden_norm.weight")
    gone += ("midlayer.input_layernorm.weight", "lm_head.weight")
    kept = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items() if n not in gone}
    assert load(lay(tmp_path / "p", config, kept), target).layer.config.recipe == "eagle1"
    kept["lm_head.weight"] = target.model.head.weight.detach()
    assert load(lay(tmp_path / "p", config, kept), target).head is None
    kept["lm_head.weight"] = -kept["lm_head.weight"]
    with pytest.raises(ConfigError, match=r"lm_head.weight is not the target's"):
        load(lay(tmp_path / "p", config, kept), target)


def test_layer_ids_follow_the_given_convention(target, three_taps):
    config, tensors = three_taps
    plain = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
    for convention, layers in (("auto", (1, 2, 4)), ("input", (1, 2, 4)), ("output", (2, 3, 5))):
        found = translate(
            fields(config), plain, target.model.config, ImportOptions(layer_ids=convention)
        )
        assert found.config.layers == layers


def test_the_window_of_the_files_is_used_unless_another_is_given(tmp_path, target, three_taps):
    config, tensors = three_taps
    path = lay(tmp_path / "p", config, tensors)
    assert load(path, target).layer.config.window == 0
    assert load(path, target, options=ImportOptions(window=24)).layer.config.window == 24
    config |= {"layer_types": ["sliding_attention"], "sliding_window": 40}
    assert load(lay(tmp_path / "q", config, tensors), target).layer.config.window == 40
