"""Law 6, the engine's share: no completion starts under weights older than those last pulled.

The refusal of weights while requests are unfinished is in `support.contract`.
"""

import pytest
import torch
from torch import Tensor

from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.model.hf.weights import hf_rows
from longtail.sampling import noise_key
from longtail.types import Completion, Request
from support.engine_requests import request_of
from support.tiny_models import tiny_model


def weights() -> dict[str, Tensor]:
    return dict(hf_rows(tiny_model("qwen2", seed=1)))  # its head is its embedding


def make_engine(seed: int, dtype: torch.dtype, version: int = 0) -> RolloutEngine:
    return RolloutEngine(
        tiny_model("qwen2", seed=seed, dtype=dtype),
        lambda tokens: "",
        EngineLimits(max_running=3, max_step_tokens=9, max_len=64),
        policy_version=version,
    )


def ask(number: int) -> Request:
    prompt = range(number + 1, number + 12)
    return request_of(str(number), prompt, noise_key(6, number), str(number), max_tokens=12)


def write(engine: RolloutEngine) -> list[Completion]:
    return engine.generate([ask(i) for i in range(5)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_after_a_pull_every_text_is_the_new_policys(dtype):
    """Parameters, packed copies, tied ones, rounded: the engine is as good as a fresh one."""
    engine = make_engine(seed=0, dtype=dtype)
    old = write(engine)
    engine.load_policy(1, weights().items())
    new = write(engine)
    assert new == write(make_engine(seed=1, dtype=dtype, version=1))
    assert all(one.tokens != other.tokens for one, other in zip(old, new, strict=True))


def test_published_tensors_are_copied():
    """The learner goes on with its parameters while the engine generates."""
    published = weights()
    engine = make_engine(seed=0, dtype=torch.float32)
    engine.load_policy(1, published.items())
    before = write(engine)
    for tensor in published.values():
        assert isinstance(tensor, Tensor)
        tensor.zero_()
    assert write(engine) == before
