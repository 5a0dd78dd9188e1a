import pytest
import torch

from longtail.assembly import memory
from longtail.config.rl import RunConfig, load
from longtail.errors import ConfigError
from longtail.model.attention import PackedAttention
from longtail.model.transformer import Family, ModelConfig, Transformer
from longtail.system import machine
from support.tiny_models import tiny_config, tiny_model


def config(*words: str) -> RunConfig:
    """Return a configuration whose dtypes and device do not depend on this machine."""
    return load(None, ["--rollout.dtype=float32", "--run.device=cpu", *words])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
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
    assert memory.activation_bytes(shape, 512, 4, recompute=True) < estimated / 2


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--rollout.max_running=4000", "--rollout.max_step_tokens=4000"), "rollout.max_running"),
        (
            ("--rollout.max_running=1", "--speculation.drafter=none"),
            "learner.tokens_per_micro_batch",
        ),
        (("--rollout.max_running=1", "--spot.features_mb=4000"), "spot.buffer_mb"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_and_names_the_fields_to_lower(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], field: str
) -> None:
    own, shape = config("--cluster.workers=2", *words), tiny_config()
    needed = 2 * sum(memory.estimate(own, shape).values())

    def check(available: int | None, *more: str) -> None:
        found = machine.Memory(total=needed, available=available)
        monkeypatch.setattr(memory.machine, "memory", lambda: found)
        memory.check(config("--cluster.workers=2", *words, *more), shape)

    check(needed)
    check(needed // 2, "--cluster.address=10.0.0.1:6379")  # the other worker has another host
    check(None)
    with pytest.raises(ConfigError, match=f"lower {field}"):
        check(needed - 1)


@pytest.mark.parametrize(
    ("words", "free", "field"),
    [
        ((), 1.0, None),
        ((), 0.39, "lower rollout.vllm.gpu_memory_utilization"),
        ((), 1e-4, "lower spot.buffer_mb"),
        (("--rollout.vllm", "{gpu_memory_utilization = 1e-6}"), 1.0, "gpu_memory_utilization"),
    ],
)
def test_on_a_gpu_the_share_of_vllm_holds_a_text_and_the_learner_has_the_rest(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], free: float, field: str | None
) -> None:
    own, shape, gpu = config("--run.device=cpu", *words), tiny_config(), torch.device("cuda")
    card = 4 * 10**9
    monkeypatch.setattr("longtail.assembly.device.run_device", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (round(free * card), card))
    if field is None:
        memory.check(own, shape, gpu)
        found = memory.estimate(own, shape, gpu)
        assert found["share of vLLM"] == round(0.4 * card)
        assert {"KV cache", "rollout weights"}.isdisjoint(found)
    else:
        with pytest.raises(ConfigError, match=field):
            memory.check(own, shape, gpu)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_vllm_that_may_sleep_takes_turns_with_the_learner(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    shape, card, device = tiny_config(), 4 * 10**9, torch.device("cuda")
    words = ("--rollout.vllm={enable_sleep_mode = true}", f"--cluster.workers={workers}")
    monkeypatch.setattr("longtail.assembly.device.run_device", lambda _: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (card, card))
    awake, own = config(f"--cluster.workers={workers}"), config(*words)
    found = memory.estimate(own, shape, device)
    passing = found["activations and scores"] + (found["gradients"] if workers == 1 else 0)
    free = sum(found.values()) - passing
    assert 0 < passing < found["share of vLLM"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, card))
    memory.check(own, shape, device)
    with pytest.raises(ConfigError):
        memory.check(awake, shape, device)


@pytest.mark.parametrize(
    ("gpus", "workers", "share", "held"), [(None, 2, 0.4, 1), (0.5, 2, 0.2, 2), (0.25, 2, 0.1, 2)]
)
def test_workers_that_share_a_gpu_divide_vllms_part_of_it(
    monkeypatch: pytest.MonkeyPatch, gpus: float | None, workers: int, share: float, held: int
) -> None:
    words = () if gpus is None else (f"--cluster.gpus_per_worker={gpus}",)
    shape, card, device = tiny_config(), 4 * 10**9, torch.device("cuda")
    own = load(None, [f"--cluster.workers={workers}", "--rollout.dtype=float32", *words])
    monkeypatch.setattr(memory, "run_device", lambda _: device)
    monkeypatch.setattr("longtail.assembly.device.run_device", lambda _: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (card, card))
    found = memory.estimate(own, shape, device)
    assert found["share of vLLM"] == round(share * card)
    given = memory.vllm_arguments(own, shape)
    if gpus is None:
        assert not given
    else:
        assert given["gpu_memory_utilization"] == pytest.approx(share)
        weights = 4 * memory.count_parameters(shape)
        assert 0 < given["kv_cache_memory_bytes"] < share * card - weights
    needed = held * sum(found.values())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (needed - 1, card))
    with pytest.raises(ConfigError, match="GB of memory"):
        memory.check(own, shape, device)
