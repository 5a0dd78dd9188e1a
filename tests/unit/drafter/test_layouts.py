"""Export and import in the engines' layouts are exact, or are refused with a remedy."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longtail.assembly.drafters import Target, at_work
from longtail.drafter.eagle.loss import Teacher, score_rows
from longtail.drafter.eagle.unroll import Pairs, unroll
from longtail.drafter.formats.layout_reader import LayoutReader
from longtail.drafter.formats.layouts import (
    LAYOUTS,
    Layout,
    engine_window,
    layers_of,
    to_config,
    to_tensors,
)
from longtail.drafter.formats.published import load_published
from longtail.errors import CheckpointError, ConfigError
from longtail.model.attention import PackedAttention
from longtail.model.hf.model import read_fields
from longtail.model.hf.weights import read_tensors, write_tensors
from longtail.model.rope import RopeConfig
from longtail.model.transformer import Transformer
from longtail.programs.drafter_export import rounded, self_check, write_layout
from longtail.rl.packing import lay_out
from support.published import DRAFT_IDS, RECORD, folded, our_drafter, target_of_six
from support.tiny_models import tiny_tokenizer

FORMS = [("eagle1", layout, False) for layout in ("vllm", "sglang", "hf")]
FORMS += [("eagle3", layout, reduced) for layout in LAYOUTS for reduced in (False, True)]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(
        model=target_of_six(), tokenizer=tiny_tokenizer(), directory=Path("target"), name="six"
    )


def export(path: Path, layout: Layout, target: Target, recipe, dtype=torch.float32, **more):
    loaded = rounded(our_drafter(target.model, target.tokenizer, recipe, **more), dtype)
    write_layout(path, layout, loaded, target, verifier="org/six", depth=3)
    return loaded


def bring_back(path: Path, target: Target, **more):
    return load_published(path, "six", target.model, target.tokenizer, **more)


@pytest.mark.parametrize(("recipe", "layout", "reduced"), FORMS)
def test_an_exported_drafter_is_imported_bit_for_bit(tmp_path, target, recipe, layout, reduced):
    path = tmp_path / "d"
    loaded = export(path, layout, target, recipe, reduced=reduced)
    again = bring_back(path, target)
    assert again.head is None  # equal to the target's rows, so it is not kept
    assert (None if again.draft_ids is None else again.draft_ids.tolist()) == (
        list(DRAFT_IDS) if reduced else None
    )
    assert again.training == RECORD
    assert again.trained_on == loaded.trained_on
    found = replace(again.layer.config, feature_scale=1.0)
    assert found == loaded.layer.config
    mine, theirs = folded(loaded), folded(again)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    # a second export writes the same files
    write_layout(tmp_path / "e", layout, again, target, verifier="org/six", depth=3)
    first, second = read_tensors(path), read_tensors(tmp_path / "e")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (path / "config.json").read_text() == (tmp_path / "e" / "config.json").read_text()


def both_scores(path: Path, loaded, model: Transformer):
    """Return the scores of the draft tokens by the independent reader and by our layer."""
    text = lay_out(
        [torch.randint(128, (40,), generator=torch.Generator().manual_seed(2)).tolist()], [1]
    )
    layer = loaded.layer.double()
    with torch.no_grad():
        context = PackedAttention(text.cu_seqlens)
        tapped = model.forward_with_features(
            text.tokens, text.positions, context, layer.config.taps
        )
        features, embeddings = (
            tapped.features.double(),
            model.embedding.weight.double()[text.tokens],
        )
        head = model.head.weight.double()
        content = read_fields(path).everything()
        reader = LayoutReader(content, read_tensors(path), layer.config.shape.rope)
        theirs, feature = reader.read(features, embeddings, head)
        output = unroll(layer, features[:-1], embeddings[1:], Pairs.of(text), 1)[0]
    ids = slice(None) if loaded.draft_ids is None else loaded.draft_ids
    mine = output.scored @ head[ids].T
    return theirs, mine, (feature, output.feature)


@pytest.mark.parametrize(("recipe", "layout", "reduced"), FORMS)
def test_an_independent_reader_finds_the_same_scores_and_features(
    tmp_path, target, recipe, layout, reduced
):
    loaded = export(tmp_path / "d", layout, target, recipe, reduced=reduced)
    config = loaded.layer.config
    loaded.layer.config = replace(config, window=engine_window(layout, config))
    theirs, mine, features = both_scores(tmp_path / "d", loaded, target.model)
    drafted = torch.ones(128, dtype=torch.bool)
    if reduced:
        drafted[:] = False
        drafted[list(DRAFT_IDS)] = True
        assert theirs[:, ~drafted].isneginf().all()
    # Sums of some hundred terms of size 1 in float64, in another order.
    torch.testing.assert_close(theirs[:, drafted], mine, rtol=0, atol=1e-12)
    torch.testing.assert_close(*features, rtol=0, atol=1e-12)


def test_norm_before_residual_is_exported_and_imported(tmp_path, target):
    loaded = export(tmp_path / "d", "vllm", target, "eagle3", norm_before_residual=True)
    theirs, mine, _ = both_scores(tmp_path / "d", loaded, target.model)
    torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-12)
    plain = export(tmp_path / "e", "vllm", target, "eagle3")
    _, other, _ = both_scores(tmp_path / "e", plain, target.model)
    assert (mine - other).abs().max() > 0.1
    assert bring_back(tmp_path / "d", target).layer.config.norm_before_residual


PROMPTS = [tuple(range(5, 40)), (9, 8, 7)]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "layout"), [("eagle1", "sglang"), ("eagle3", "vllm")])
def test_the_self_check_passes_a_correct_export_and_refuses_any_changed_tensor(
    tmp_path, target, recipe, layout
):
    path = tmp_path / "d"
    loaded = export(path, layout, target, recipe)
    found = self_check(path, loaded, target, PROMPTS, 16)
    assert found.score_error < 1e-12
    assert found.num_verified > 0
    right = read_tensors(path)
    for name in right:
        spoiled = right[name].clone()
        spoiled.view(-1)[0] += 1
        write_tensors({**right, name: spoiled}, path)
        with pytest.raises((CheckpointError, ConfigError)):
            self_check(path, loaded, target, PROMPTS, 16)


@pytest.mark.slow
def test_a_bfloat16_export_is_checked_against_the_rounded_drafter(tmp_path, target):
    loaded = export(tmp_path / "d", "hf", target, "eagle3", torch.bfloat16, reduced=True)
    assert read_tensors(tmp_path / "d")["fc.weight"].dtype == torch.bfloat16
    assert read_tensors(tmp_path / "d")["d2t"].dtype == torch.int64
    assert self_check(tmp_path / "d", loaded, target, PROMPTS, 16).score_error < 1e-12


def test_offsets_map_draft_ids_to_target_ids(target):
    loaded = our_drafter(target.model, target.tokenizer, reduced=True)
    tensors = to_tensors("vllm", loaded.layer, target.model, loaded.draft_ids, None, torch.float32)
    assert tensors["d2t"].tolist() == [1, 4, 5, 27, 60, 95]
    assert tensors["t2d"].nonzero().flatten().tolist() == list(DRAFT_IDS)
    assert tensors["t2d"].dtype == torch.bool
    assert torch.equal(tensors["lm_head.weight"], target.model.head.weight[list(DRAFT_IDS)])


def tensors_of(layout, target, recipe):
    loaded = our_drafter(target.model, target.tokenizer, recipe)
    return to_tensors(layout, loaded.layer, target.model, None, None, torch.float32)


def test_each_layout_holds_the_tensors_that_its_engine_loads(target):
    own = {f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo"} | {"fc.weight"}
    own |= {f"layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    own |= {"layers.0.post_attention_layernorm.weight"}
    assert tensors_of("vllm", target, "eagle1").keys() == own
    assert tensors_of("hf", target, "eagle1").keys() == own | {"embed_tokens.weight"}
    # SGLang's fc has a bias, which stays random unless the file holds one.
    served = tensors_of("sglang", target, "eagle1")
    assert served.keys() == own | {"fc.bias"}
    assert not served["fc.bias"].any()
    norms = {f"layers.0.{x}norm.weight" for x in ("input_layer", "hidden_")}
    whole = own | norms | {"norm.weight", "lm_head.weight"}
    assert tensors_of("speculators", target, "eagle3").keys() == whole | {"embed_tokens.weight"}
    mid = {name.replace("layers.0.", "midlayer.") for name in whole}
    assert tensors_of("vllm", target, "eagle3").keys() == mid
    assert tensors_of("sglang", target, "eagle3").keys() == mid


def config_of(layout, target, recipe="eagle3", **more):
    config = our_drafter(target.model, target.tokenizer, recipe, **more).layer.config
    return to_config(layout, config, torch.float32, verifier="org/six", depth=3)


KEY = "eagle_aux_hidden_state_layer_ids"


def test_tapped_layers_are_counted_as_the_engine_counts_them(target):
    assert config_of("vllm", target)["eagle_config"][KEY] == [1, 2, 4]
    assert config_of("sglang", target)["eagle_config"][KEY] == [0, 1, 3]
    assert config_of("speculators", target)[KEY] == [1, 2, 4]
    deeper = replace(target.model.config, num_layers=8)
    config = replace(our_drafter(target.model, target.tokenizer).layer.config, target=deeper)
    usual = replace(config, layers=(2, 4, 5))  # what engines tap by themselves
    for layout in LAYOUTS:
        content = to_config(layout, usual, torch.float32, verifier="x", depth=3)
        assert KEY not in content
        assert "eagle_config" not in content


def test_a_window_is_written_only_for_engines_that_apply_it(target):
    inner = config_of("speculators", target)["transformer_layer_config"]
    for content in (config_of("vllm", target), inner):
        assert content["sliding_window"] == 16
        assert content["layer_types"] == ["sliding_attention"]
    for layout, recipe in (("sglang", "eagle3"), ("hf", "eagle3"), ("vllm", "eagle1")):
        assert "sliding_window" not in config_of(layout, target, recipe)


def test_speculators_names_the_verifier_and_the_chain(target):
    content = config_of("speculators", target, reduced=True)
    assert content["architectures"] == ["Eagle3DraftModel"]
    assert content["speculators_model_type"] == "eagle3"
    assert content["draft_vocab_size"] == 6
    assert content["norm_before_residual"] is False
    asked = content["speculators_config"]
    assert asked["verifier"] == {"name_or_path": "org/six", "architectures": ["Qwen3ForCausalLM"]}
    assert asked["proposal_methods"][0]["speculative_tokens"] == 3


def test_the_layer_is_described_as_a_llama_for_every_target(target):
    content = config_of("vllm", target, "eagle1")
    assert content["architectures"] == ["LlamaForCausalLM"]
    assert config_of("sglang", target, "eagle1")["architectures"] == ["LlamaForCausalLMEagle"]
    assert content["model_type"] == "llama"
    assert content["num_hidden_layers"] == 1
    assert content["attention_bias"] is False
    scaled = replace(
        our_drafter(target.model, target.tokenizer).layer.config,
        own_shape=replace(target.model.config, rope=RopeConfig(theta=5e5)),
    )
    written = to_config("vllm", scaled, torch.float32, verifier="x", depth=3)
    assert written["rope_parameters"]["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("layout", "recipe", "more", "message"),
    [
        ("speculators", "eagle1", {}, "it has no eagle1 .*--to vllm"),
        ("sglang", "eagle3", {"layers": (1, 3)}, r"reads the layers \[1, 3\].*--to vllm"),
        ("sglang", "eagle3", {"layers": (0, 2, 4)}, "none is the first.*--to vllm"),
        ("sglang", "eagle3", {"norm_before_residual": True}, "norm_before_residual, which SGLang"),
    ],
)
def test_a_drafter_that_a_layout_cannot_express_is_refused_with_a_remedy(
    target, layout, recipe, more, message
):
    with pytest.raises(ConfigError, match=message):
        config_of(layout, target, recipe, **more)
    loaded = our_drafter(target.model, target.tokenizer, recipe, **more)
    with pytest.raises(ConfigError, match=message):
        to_tensors(layout, loaded.layer, target.model, None, None, torch.float32)


def test_layer_ids_are_read_in_either_convention():
    assert layers_of(None, 32, "auto") == (2, 16, 29)
    assert layers_of([2, 16, 29], 32, "auto") == layers_of([1, 15, 28], 32, "auto") == (2, 16, 29)
    assert layers_of([4, 9, 20], 32, "auto") == layers_of([4, 9, 20], 32, "input") == (4, 9, 20)
    assert layers_of([4, 9, 20], 32, "output") == (5, 10, 21)


def test_a_head_equal_to_the_targets_rows_trains_the_same(target):
    generator = torch.Generator().manual_seed(1)
    hidden, scored = (
        torch.randn(5, 32, generator=generator),
        torch.randn(2, 5, 32, generator=generator),
    )
    head, ids = target.model.head.weight.detach(), torch.tensor(DRAFT_IDS)
    mine = score_rows(scored, Teacher(hidden=hidden, head=head, draft_ids=ids))
    own = score_rows(
        scored, Teacher(hidden=hidden, head=head, draft_ids=ids, drafter_head=head[ids])
    )
    assert torch.equal(mine.cross_entropy, own.cross_entropy)
    other = Teacher(hidden=hidden, head=head, draft_ids=ids, drafter_head=-head[ids])
    assert not torch.equal(score_rows(scored, other).cross_entropy, mine.cross_entropy)


@pytest.mark.slow
def test_a_drafter_with_the_targets_rows_as_its_own_head_drafts_the_same(target, tmp_path):
    loaded = export(tmp_path / "d", "vllm", target, "eagle3", reduced=True)
    again = replace(loaded, head=target.model.head.weight[list(DRAFT_IDS)].detach().clone())
    assert self_check(tmp_path / "d", again, target, PROMPTS, 16).num_verified > 0
    assert at_work(again, target).taps.layers == (1, 2, 4)
