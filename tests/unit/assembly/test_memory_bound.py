from pathlib import Path

import pytest
import torch

from longtail.assembly import memory_bound
from longtail.assembly.plan import RunPlan
from longtail.config.rl import load
from longtail.errors import ConfigError
from longtail.model.attention import PackedAttention
from longtail.model.size import activation_bytes, count_parameters
from longtail.model.transformer import ModelConfig, Transformer
from longtail.system import machine
from support.tiny_models import tiny_config


def planned(*words: str, gpus: float = 0.0) -> RunPlan:
    """Return the plan of a small model, which does not depend on this machine."""
    return RunPlan(
        config=load(None, ["--rollout.dtype=float32", *words]),
        directory=Path("model"),
        shape=tiny_config(),
        device=torch.device("cuda" if gpus else "cpu"),
        gpus=gpus,
        on_vllm=gpus > 0,
    )


def with_card(monkeypatch: pytest.MonkeyPatch, free: float, whole: float) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (round(free), round(whole)))


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
def test_the_estimate_of_activations_is_near_what_autograd_keeps(family):
    shape = ModelConfig(
        family=family, vocab_size=64, hidden_size=96, intermediate_size=256, num_layers=4,
        num_heads=6, num_kv_heads=2, head_dim=16, max_positions=512, qk_norm=family == "qwen3",
    )  # fmt: skip
    model = Transformer(shape)
    model.initialize(torch.Generator().manual_seed(0))
    measured = _saved_bytes(model, 512)
    estimated = activation_bytes(shape, 512, 4, recompute=False)
    # an upper bound that is not far off: what the estimate adds is the layer in flight
    assert measured <= estimated <= 1.15 * measured
    assert activation_bytes(shape, 512, 4, recompute=True) < estimated / 2


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--rollout.max_running=4000", "--rollout.max_step_tokens=4000"), "rollout.max_running"),
        (("--rollout.max_running=1",), "learner.tokens_per_micro_batch"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_and_names_the_fields_to_lower(
    monkeypatch, words, field
):
    needed = 2 * sum(memory_bound.estimate(planned("--cluster.workers=2", *words)).values())

    def check(available: int | None, *more: str) -> None:
        found = machine.Memory(total=needed, available=available)
        monkeypatch.setattr(memory_bound.machine, "memory", lambda: found)
        memory_bound.check(planned("--cluster.workers=2", *words, *more))

    check(needed)
    check(needed // 2, "--cluster.address=10.0.0.1:6379")  # the other worker has another host
    check(None)
    with pytest.raises(ConfigError, match=f"lower {field}"):
        check(needed - 1)


@pytest.mark.parametrize(("lacking", "sums"), [(0, "auto"), (1, "float")])
def test_sums_are_exact_where_the_device_has_room_and_otherwise_as_set(monkeypatch, lacking, sums):
    own, exact = planned(), planned("--learner.sums=exact")
    found = machine.Memory(total=sum(memory_bound.estimate(exact).values()) - lacking, available=1)
    monkeypatch.setattr(memory_bound.machine, "memory", lambda: found)
    said = list[str]()
    assert memory_bound.fitted(own, said.append).config.learner.sums == sums
    assert len(said) == lacking
    assert memory_bound.fitted(exact) is exact


def test_on_a_gpu_vllm_has_its_share_and_the_learner_the_rest(monkeypatch):
    own, card = planned(gpus=1.0), 4e9
    with_card(monkeypatch, card, card)
    memory_bound.check(own)
    found = memory_bound.estimate(own)
    assert found["share of vLLM"] == round(0.4 * card)
    assert {"KV cache", "rollout weights"}.isdisjoint(found)
    with_card(monkeypatch, 0.39 * card, card)
    with pytest.raises(ConfigError, match=r"lower rollout\.vllm\.gpu_memory_utilization"):
        memory_bound.check(own)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_vllm_that_may_sleep_takes_turns_with_the_learner(monkeypatch, workers):
    card, words = 4e9, (f"--cluster.workers={workers}",)
    with_card(monkeypatch, card, card)
    own = planned("--rollout.vllm={enable_sleep_mode = true}", *words, gpus=1.0)
    found = memory_bound.estimate(own)
    passing = found["activations and scores"] + (found["gradients"] if workers == 1 else 0)
    free = sum(found.values()) - passing
    assert 0 < passing < found["share of vLLM"]
    with_card(monkeypatch, free, card)
    memory_bound.check(own)
    with pytest.raises(ConfigError):
        memory_bound.check(planned(*words, gpus=1.0))


@pytest.mark.parametrize(("gpus", "share", "held"), [(1.0, 0.4, 1), (0.5, 0.2, 2), (0.25, 0.1, 2)])
def test_workers_that_share_a_gpu_divide_vllms_part_of_it(monkeypatch, gpus, share, held):
    own, card = planned("--cluster.workers=2", gpus=gpus), 4e9
    with_card(monkeypatch, card, card)
    found = memory_bound.estimate(own)
    assert found["share of vLLM"] == round(share * card)
    given = memory_bound.vllm_arguments(own)
    if gpus == 1:
        assert not given
    else:
        assert given["gpu_memory_utilization"] == pytest.approx(share)
        weights = 4 * count_parameters(own.shape)
        assert 0 < given["kv_cache_memory_bytes"] < share * card - weights
    with_card(monkeypatch, held * sum(found.values()) - 1, card)
    with pytest.raises(ConfigError, match="GB of memory"):
        memory_bound.check(own)


def test_adapters_need_less_memory():
    few, all_weights = planned("--learner.lora.rank=4"), planned()
    assert sum(memory_bound.estimate(few).values()) < sum(
        memory_bound.estimate(all_weights).values()
    )
