"""A tiny random model of one family: written by vLLM, learned by transformers' code; run by path.

    python -I families.py FAMILY DIR DRAFTER SRC TESTS

One JSON object on standard output: the largest gap of a logprob between vLLM and the learner,
before and after a step of the learner whose weights vLLM takes; all texts; drafted tokens. DRAFTER
is `none`, or `learned` by vLLM.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

_SHAPE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32},
    "olmo2": {},
    "olmo3": {"sliding_window": 16},
    "smollm3": {},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "phi3": {},
    "glm4": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
    "mixtral": _EXPERTS,
    "gpt_oss": {
        **_EXPERTS, "head_dim": 32, "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "original_max_position_embeddings": 64, "truncate": False,
        },
    },
}  # fmt: skip


def main(family: str, place: str, drafter: str, *packages: str) -> None:
    """Write, learn, and write again."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:0] = packages
    import torch

    torch.set_num_threads(1)
    make(family, Path(place))
    from longtail.config.rl import LearnerSection
    from longtail.engine.request import EngineLimits
    from longtail.model.hf.causal import CausalModel, read_pretrained
    from longtail.rl.learner import Learner
    from longtail.rl.packing import pack_rollouts
    from longtail.types import Request, SamplingParams
    from longtail.vllm.generator import VllmGenerator
    from support.rollouts import rollout

    policy = CausalModel(read_pretrained(Path(place), torch.float32, "cpu"))
    learner = Learner(policy, LearnerSection(learning_rate=0.02))
    own = {"drafter": drafter} if drafter == "learned" else {}
    generator = VllmGenerator(
        Path(place),
        lambda tokens: "",
        EngineLimits(max_running=4, max_step_tokens=64, max_len=64),
        dtype=torch.float32,
        options={"additional_config": {"longtail": own}},
    )
    asked = [
        Request(
            request_id=f"{index}",
            prompt_tokens=tuple((7 * index + 3 * j) % 120 + 2 for j in range(5 + 3 * index)),
            noise_key=index,
            sampling=SamplingParams(max_tokens=32),
        )
        for index in range(6)
    ]
    gaps: list[float] = []
    tokens: list[list[int]] = []
    drafted: list[int] = []
    for version in range(2):
        generator.load_policy(version, learner.published())
        done = generator.generate(
            asked, lambda step: drafted.extend(each.num_drafted for each in step.verified)
        )
        tokens += [list(each.tokens) for each in done]
        gaps.append(gap(policy, asked, done))
        texts = [
            rollout(
                (*request.prompt_tokens, *each.tokens),
                len(request.prompt_tokens),
                logprobs=each.logprobs,
            )
            for request, each in zip(asked, done, strict=True)
        ]
        advantages = [1.0 if index % 2 else -1.0 for index in range(len(texts))]
        learner.step([pack_rollouts(texts, advantages, sampling=SamplingParams(), budget=256)])
    found = {"gaps": gaps, "tokens": tokens, "drafted": sum(drafted)}
    print(json.dumps(found), file=replies, flush=True)


def make(family: str, path: Path) -> None:
    """Write a random model, with logits of standard deviation about 1."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_SHAPE, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * noise)
    model.save_pretrained(path)


def gap(policy: Any, asked: Any, done: Any) -> float:
    """Return the largest gap of a logprob."""
    import torch

    from longtail.rl.logprobs import score
    from longtail.rl.packing import lay_out

    found = 0.0
    for request, each in zip(asked, done, strict=True):
        text = (*request.prompt_tokens, *each.tokens)
        packed = lay_out([text], prompt_lens=[len(request.prompt_tokens)])
        with torch.no_grad():
            own = score(policy, packed, request.sampling).logprobs
        found = max(found, float((own - torch.tensor(each.logprobs)).abs().max()))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
