import math
from collections.abc import Sequence

import pytest
import torch

from longtail.assembly import memory
from longtail.config import rl as config_module
from longtail.config.rl import RunConfig
from longtail.model.attention import PackedAttention
from longtail.model.transformer import Family, ModelConfig, Transformer
from support.tiny_models import tiny_config, tiny_model

FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")


def load(path: None, words: Sequence[str] = ()) -> RunConfig:
    """Return a configuration whose dtypes do not depend on this machine."""
    return config_module.load(path, ["--rollout.dtype=float32", *words])


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_without_a_model(family: Family) -> None:
    model = tiny_model(family)
    assert memory.count_parameters(model.config) == sum(p.numel() for p in model.parameters())


def _saved_bytes(model: Transformer, tokens: int) -> int:
    """Bytes of the distinct storages that autograd keeps, weights excluded.

    Products of oneDNN pad their rows to a multiple of 128: a number that is one shows the rest.
    """
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(
            torch.zeros(tokens, dtype=torch.long),
            torch.arange(tokens),
            PackedAttention([0, tokens // 2, tokens]),
        )
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_estimate_of_activations_is_near_what_autograd_keeps(family: Family) -> None:
    shape = ModelConfig(
        family=family, vocab_size=64, hidden_size=96, intermediate_size=256, num_layers=4,
        num_heads=6, num_kv_heads=2, head_dim=16, max_positions=512, qk_norm=family == "qwen3",
    )  # fmt: skip
    model = Transformer(shape)
    model.initialize(torch.Generator().manual_seed(0))
    measured = _saved_bytes(model, 512)
    estimated = memory.activation_bytes(shape, 512, 4, recompute=False)
    # an upper bound that is not far off: what the estimate adds is the layer in flight
    assert measured <= estimated <= 1.15 * measured


def test_checkpointed_layers_keep_far_less() -> None:
    shape = tiny_config()
    assert memory.activation_bytes(shape, 100, 4, recompute=True) < memory.activation_bytes(
        shape, 100, 4, recompute=False
    )


def _bytes(config: RunConfig, name: str) -> int:
    estimated = memory.estimate(config, tiny_config("llama"), on_cpu=True)
    return int(getattr(estimated, name).bytes)


def test_each_item_follows_its_configuration_fields() -> None:
    parameters = memory.count_parameters(tiny_config("llama"))
    config = load(None, ["--rollout.max_running=3", "--rollout.max_tokens=100"])
    # keys and values, 2 layers, 2 heads of 8, float32, 3 requests of 512 + 100
    assert _bytes(config, "kv_cache") == 2 * 2 * 2 * 8 * 4 * 3 * 612
    assert _bytes(load(None, ["--rollout.kv_tokens=5000"]), "kv_cache") == 128 * 2 * 5000
    assert _bytes(config, "rollout_weights") == 4 * parameters
    assert _bytes(config, "optimizer_moments") == 8 * parameters
    assert _bytes(config, "reference_model") == 0
    drifting = load(None, ["--learner.kl_coef=0.1"])
    assert _bytes(drifting, "reference_model") == 4 * parameters
    # what KV may take while nothing is learned, but for what learning leaves behind
    assert memory.estimate(drifting, tiny_config("llama")).made_later == (4 + 8) * parameters
    exact = load(None, ["--learner.dtype=float64", "--rollout.dtype=bfloat16"])
    assert _bytes(exact, "master_weights") == 8 * parameters
    assert _bytes(exact, "rollout_weights") == 2 * parameters
    # the embedding is looked up, not multiplied, so it is not packed: 128 x 32
    assert _bytes(exact, "packed_matrices") == 2 * (parameters - 128 * 32)


def test_each_worker_keeps_all_moments_and_an_undo_of_steps_with_several_updates() -> None:
    moments = 8 * memory.count_parameters(tiny_config("llama"))
    config = load(None, ["--cluster.workers=4"])
    assert _bytes(config, "optimizer_moments") == moments
    assert _bytes(config, "undo_of_a_step") == 0
    several = load(None, ["--cluster.workers=2", "--learner.mini_batches=2"])
    assert _bytes(several, "undo_of_a_step") == moments // 2 + moments


def test_each_worker_holds_one_shard_and_all_weights_are_in_main_memory() -> None:
    weights = 4 * memory.count_parameters(tiny_config("llama"))
    words = ["--learner.sharding=full", "--learner.kl_coef=0.1", "--learner.mini_batches=2"]
    config = load(None, ["--cluster.workers=3", *words])
    for name in ("weight_shard", "gradients", "reference_model"):
        assert _bytes(config, name) == math.ceil(weights / 3)
    assert _bytes(config, "optimizer_moments") == math.ceil(2 * weights / 3)
    assert _bytes(config, "whole_weights") == 2 * weights
    assert _bytes(config, "undo_of_a_step") == 0
    on_gpu = memory.estimate(config, tiny_config("llama")).items.keys()
    assert on_gpu.isdisjoint({"master_weights", "published_weights", "whole_weights"})
    alone = load(None, words)
    assert _bytes(alone, "master_weights") == _bytes(alone, "gradients") == weights


def test_the_total_is_the_sum_and_a_misfit_names_the_fields_to_lower() -> None:
    estimated = memory.estimate(load(None), tiny_config())
    assert estimated.total == sum(item.bytes for item in estimated.items.values())
    cells = [list(c.cells) for c in memory.table(estimated, estimated.total - 1, "cpu").columns]
    assert any("does not fit; lower" in str(cell) for cell in cells[2])
    cells = [list(c.cells) for c in memory.table(estimated, estimated.total, "cpu").columns]
    assert not any("does not fit" in str(cell) for cell in cells[2])


def test_a_run_that_does_not_fit_lowers_what_was_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, said = tiny_config(), []
    whole = load(None, ["--cluster.workers=2", "--run.device=cpu"])
    needed = 2 * memory.estimate(whole, shape, on_cpu=True).total

    def fitted(available: int | None, *words: str) -> RunConfig:
        monkeypatch.setattr(memory, "available_bytes", lambda device: available)
        own = load(None, ["--cluster.workers=2", "--run.device=cpu", *words])
        return memory.fitted(own, shape, said.append)

    assert fitted(needed) == fitted(None) == whole
    assert said == []
    less = fitted(3 * needed // 4)
    assert 2 * memory.estimate(less, shape, on_cpu=True).total <= 3 * needed // 4
    assert less.learner.tokens_per_micro_batch < whole.learner.tokens_per_micro_batch
    assert said[0].startswith("memory: learner.tokens_per_micro_batch = ")
    kept = fitted(1, "--learner.tokens_per_micro_batch=4096", "--rollout.max_running=64")
    assert kept.learner.tokens_per_micro_batch == 4096
    assert kept.rollout.max_running == 64
    least = fitted(1)
    assert (least.learner.tokens_per_micro_batch, least.rollout.max_running) == (1024, 8)
