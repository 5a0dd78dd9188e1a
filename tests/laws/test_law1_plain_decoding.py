"""Law 1, as far as plain decoding goes: the text is a function of weights, prompt and key.

The definition is `fakes.write_plainly`: one request, everything recomputed for every token. What
speculation adds to the law is tested where speculation is.
"""

import pytest
import torch

from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.sampling import noise_key
from longtail.types import Request, SamplingParams
from support.fakes import write_plainly
from support.tiny_models import tiny_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SAMPLINGS = (
    SamplingParams(max_tokens=20),
    SamplingParams(max_tokens=20, temperature=0.0),
    SamplingParams(max_tokens=20, temperature=0.6, top_k=20, top_p=0.95),
    SamplingParams(max_tokens=20, temperature=1.5, min_p=0.05, stop_token_ids=tuple(range(0, 9))),
)


def make_engine(family: str) -> RolloutEngine:
    return RolloutEngine(
        tiny_model(family, dtype=torch.float64),
        lambda tokens: "",
        EngineLimits(max_running=8, max_step_tokens=16, max_len=64),
    )


def ask(name: str, key: int = 0, sampling: SamplingParams = SAMPLINGS[0]) -> Request:
    prompt = tuple((7 * j) % 128 for j in range(1, 14))
    return Request(request_id=name, prompt_tokens=prompt, noise_key=key, sampling=sampling)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_writes_what_the_definition_writes(family):
    requests = [
        ask(f"{i}/{key}", noise_key(1, key), sampling)
        for i, sampling in enumerate(SAMPLINGS)
        for key in range(2)
    ]
    model = tiny_model(family, dtype=torch.float64)
    for request, done in zip(requests, make_engine(family).generate(requests), strict=True):
        tokens, logprobs = write_plainly(model, request)
        assert done.tokens == tokens
        # float64 sums in another order: 1e-16 an operation, some hundreds of them.
        assert done.logprobs == pytest.approx(logprobs, abs=1e-12)
