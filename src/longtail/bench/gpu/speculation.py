"""Batch-invariant drafting of `longtail bench gpu`: it must change no bit."""

import torch

from longtail.bench.gpu.steps import random_model
from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.model.transformer import ModelConfig
from longtail.sampling import noise_key
from longtail.speculation.strategy import Strategy
from longtail.types import Request, SamplingParams


def changes_no_bit(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether batch-invariant drafting leaves every bit of tokens and logprobs unchanged."""
    model = random_model(config, dtype, device)
    model.batch_invariant = True
    layer = EagleLayer(EagleConfig(recipe="eagle1", target=config))
    layer.initialize(torch.Generator().manual_seed(0))
    drafter = EagleDrafter(layer.to(device, dtype), model)
    requests = [
        Request(
            request_id=str(index),
            prompt_tokens=(1, 2, 3 + index),
            noise_key=noise_key(0, "bench", index),
            sampling=SamplingParams(max_tokens=24),
        )
        for index in range(12)
    ]
    limits = EngineLimits(max_running=8, max_step_tokens=512, max_len=64)
    engine = RolloutEngine(model, lambda tokens: "", limits)
    plain = engine.generate(requests)
    shape = Strategy(depth=3, width=2, size=5, beam=2)
    engine.speculate(Speculation.fixed(drafter, shape))
    drafted = engine.generate(requests)
    return all(
        (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
        for one, other in zip(plain, drafted, strict=True)
    )
