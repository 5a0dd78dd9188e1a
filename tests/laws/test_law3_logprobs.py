"""Law 3: a completion's logprobs are the learner's logprobs of the same tokens, drafted or not."""

import itertools

import pytest
import torch

from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.model.hf.causal import CausalModel, read_pretrained
from longtail.model.hf.model import save_model
from longtail.model.policy import Policy
from longtail.model.transformer import Transformer
from longtail.rl.logprobs import score
from longtail.rl.packing import lay_out
from longtail.sampling import noise_key
from longtail.speculation.strategy import Strategy
from longtail.types import Completion, Request, SamplingParams
from support.drafters import ScriptedDrafter, ragged
from support.engine_requests import FAMILIES, known_texts
from support.tiny_models import tiny_model

PLAIN = SamplingParams(max_tokens=24, stop_token_ids=(3, 4, 5), stop=("\x50\x51",))
TRUNCATED = (
    SamplingParams(max_tokens=24, temperature=0.7, top_k=30),
    SamplingParams(max_tokens=24, temperature=1.4, top_p=0.9),
    SamplingParams(max_tokens=24, temperature=1.2, min_p=0.03),
    SamplingParams(max_tokens=24, temperature=0.8, top_k=60, top_p=0.95, min_p=0.01),
)


def write(
    model: Transformer, sampling: SamplingParams, *, drafted: bool = False
) -> list[tuple[Request, Completion]]:
    """Five groups of four under everything at once: chunks, shared prompts, preemption, stops.

    Drafts are ragged trees made of what plain decoding writes, and of errors.
    """
    engine = RolloutEngine(
        model,
        lambda tokens: "".join(map(chr, tokens)),
        EngineLimits(
            max_running=6, max_step_tokens=40 if drafted else 17, max_len=64, kv_tokens=160
        ),
    )
    if drafted:
        requests, plain = zip(*write(model, sampling), strict=True)
        drafter = ScriptedDrafter(known_texts(requests, plain), ragged(5))
        engine.speculate(Speculation.fixed(drafter, Strategy(depth=4, size=6)))
    requests = [
        Request(
            request_id=f"{group}#{sample}",
            prompt_tokens=tuple((11 * group + 5 * j) % 128 for j in range(prompt_len)),
            noise_key=noise_key(0, group, sample),
            sampling=sampling,
            group_id=str(group),
        )
        for group, prompt_len in enumerate((1, 2, 13, 29, 40))
        for sample in range(4)
    ]
    completions = engine.generate(requests)
    counts = engine.scheduler
    assert counts.num_preemptions > 0
    assert counts.num_shared_tokens > 0
    if drafted:
        assert drafter.num_nodes > drafter.num_accepted > 50
    return list(zip(requests, completions, strict=True))


def gaps(
    model: Policy, written: list[tuple[Request, Completion]], sampling: SamplingParams
) -> torch.Tensor:
    """|engine - learner| for every token, the sequences packed into one micro-batch."""
    packed = lay_out(
        [(*request.prompt_tokens, *done.tokens) for request, done in written],
        prompt_lens=[len(request.prompt_tokens) for request, _ in written],
    )
    with torch.no_grad():
        theirs = score(model, packed, sampling).logprobs.double()
    mine = torch.tensor(
        list(itertools.chain.from_iterable(done.logprobs for _, done in written)),
        dtype=torch.float64,
    )
    assert mine.shape == theirs.shape
    assert bool(mine.isfinite().all())
    assert bool((mine < 0).any())
    return (mine - theirs).abs()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sampling", "drafted"),
    [
        ("mistral", PLAIN, False),
        ("mistral", PLAIN, True),
        *((family, sampling, True) for family, sampling in zip(FAMILIES, TRUNCATED, strict=True)),
    ],
)
def test_float64_logprobs_are_equal(family, sampling, drafted):
    """Two orders of summation of some hundred terms of size 1: below 1e-13, given room."""
    written = write(tiny_model(family, dtype=torch.float64), sampling, drafted=drafted)
    assert sampling != PLAIN or len({len(done.tokens) for _, done in written}) > 2, "some stopped"
    gap = gaps(tiny_model(family, dtype=torch.float64), written, sampling)
    assert float(gap.max()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "autocast", "drafted"), [("qwen2", False, True), ("qwen3", True, False)]
)
def test_bfloat16_logprobs_are_close(family, autocast, drafted):
    """A logit of 4 is rounded by up to 0.008, after hidden states rounded as coarsely.

    The learner may keep float32 weights and compute in bfloat16 by autocast; the engine holds
    bfloat16 ones. Then the residual stream differs by its roundings, too.
    """
    written = write(tiny_model(family, dtype=torch.bfloat16), PLAIN, drafted=drafted)
    learner = tiny_model(family, dtype=torch.float32 if autocast else torch.bfloat16)
    if autocast:  # the published weights are the learner's, rounded
        learner.load_state_dict(tiny_model(family, dtype=torch.bfloat16).state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        gap = gaps(learner, written, PLAIN)
    assert float(gap.mean()) < 0.015
    assert float(gap.max()) < 0.1


@pytest.mark.slow
def test_logprobs_of_transformers_code_are_equal_up_to_rounding(tmp_path):
    save_model(tiny_model("mistral"), tmp_path)
    written = write(tiny_model("mistral"), PLAIN)
    other = CausalModel(read_pretrained(tmp_path, torch.float32))
    assert float(gaps(other, written, PLAIN).max()) < 1e-5
