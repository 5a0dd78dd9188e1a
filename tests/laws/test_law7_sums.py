"""Law 7 for a drafter that learns from sums: its bits follow from the texts alone.

The sums over all texts are equal for any number of engines, any batch, with and without drafts and
preemption; so is the drafter. Whole runs: end_to_end/test_cluster.py, test_law8_resume.py.
"""

import random
from dataclasses import replace

import pytest
import torch

from longtail.drafter.ridge.drafter import RidgeDrafter
from longtail.drafter.ridge.layer import RidgeConfig, RidgeLayer
from longtail.drafter.ridge.sums import SequenceSums
from longtail.engine.engine import RolloutEngine
from longtail.engine.report import RolloutReport
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.model.kernels import native
from longtail.sampling import noise_key
from longtail.speculation.drafter import Sums
from longtail.speculation.strategy import Strategy
from longtail.tuner.tuner import OffTuner
from longtail.types import Request
from support.contract import wander
from support.eagle_requests import text
from support.engine_requests import request_of
from support.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(
    native.layout(torch.float32) is None, reason="a state may depend on its batch"
)


def _request(index: int) -> Request:
    sampling = {"temperature": 0.3, "stop_token_ids": tuple(range(0, 128, 16))}
    prompt, most = text(3 + index % 5, seed=index), 5 + 7 * index % 40
    return request_of(str(index), prompt, noise_key(3, index), max_tokens=most, **sampling)


def _engine(
    limits: EngineLimits, strategy: Strategy | None = None, learned: Sums | None = None
) -> tuple[RolloutEngine, SequenceSums]:
    """Return an engine with these limits and drafts, and what adds up its texts."""
    model = tiny_model()
    model.pack()
    drafter = RidgeDrafter(RidgeLayer(RidgeConfig(target=model.config, slots=4)), model)
    if learned is not None:
        drafter.load_weights(learned.weights([0]))
    texts = drafter.statistics()
    plain = Speculation(drafters=(), tuner=OffTuner(), guarded=False)
    drafts = plain if strategy is None else Speculation.fixed(drafter, strategy)
    engine = RolloutEngine(model, lambda ids: "".join(map(chr, ids)), limits)
    engine.speculate(replace(drafts, statistics=texts))
    return engine, texts


def _write(
    requests: list[Request],
    limits: EngineLimits,
    strategy: Strategy | None = None,
    learned: Sums | None = None,
) -> Sums:
    """Return the sums over what an engine writes."""
    meter = RolloutReport()
    engine, texts = _engine(limits, strategy, learned)
    engine.generate(requests, meter.add)
    assert strategy is None or meter.accept_length > 1.3, "texts also end in drafts"
    return texts.take()


@pytest.mark.parametrize("seed", range(3))
def test_sums_do_not_depend_on_workers_batches_drafts_or_preemption(seed: int) -> None:
    choose, requests = random.Random(seed), [_request(index) for index in range(40)]
    roomy = EngineLimits(max_running=40, max_step_tokens=400, max_len=64)
    whole = _write(requests, roomy)
    assert whole.num_tokens > 200
    choose.shuffle(requests)
    cut = choose.randrange(10, 30)
    tight = EngineLimits(max_running=5, max_step_tokens=16, max_len=64, kv_tokens=96)
    shape = choose.choice((Strategy(depth=3), Strategy(depth=4, width=2, beam=1, size=8)))
    found = _write(requests[:cut], tight, shape, whole)
    found.add(_write(requests[cut:], roomy, None if seed else shape, whole))
    for name, tensor in whole.tensors().items():
        assert found.tensors()[name].equal(tensor), name
    weights, parts = whole.weights([0]), choose.randrange(1, 6)
    solved = {
        name: x for part in range(parts) for name, x in found.weights([0], part, parts).items()
    }
    assert solved.keys() == weights.keys()
    assert all(each.equal(weights[name]) for name, each in solved.items())


def test_a_text_that_is_given_up_and_written_again_counts_once() -> None:
    requests = [_request(index) for index in range(24)]
    roomy = EngineLimits(max_running=24, max_step_tokens=240, max_len=64)
    tight = EngineLimits(max_running=5, max_step_tokens=16, max_len=64, kv_tokens=96)
    whole = _write(requests, roomy)
    shape = Strategy(depth=3)
    (one, ones), (other, others) = _engine(tight, shape, whole), _engine(roomy, shape, whole)
    wander([one, other], requests, seed=1)
    found, apart = ones.take(), others.take()
    assert min(found.num_tokens, apart.num_tokens) > 50
    found.add(apart)
    for name, tensor in whole.tensors().items():
        assert found.tensors()[name].equal(tensor), name
