"""vLLM's Sampler, RejectionSampler and sample_draft on synthetic logits."""

from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_sources.loader import GPU, Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Sampling parameters of requests, one entry each."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor

    def __len__(self) -> int:
        return len(self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of a step: the owner of each, its place among its owner's rows, its position."""

    owner: Tensor
    place: Tensor
    position: Tensor
    starts: Tensor

    def __len__(self) -> int:
        return len(self.owner)


def rows(drafts: Tensor, positions: Tensor) -> Rows:
    """Return the rows of requests with `drafts[r]` drafts each, from position `positions[r]` on."""
    counts = drafts + 1
    owner = torch.arange(len(drafts)).repeat_interleave(counts)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    place = torch.arange(len(owner)) - starts[owner]
    return Rows(owner=owner, place=place, position=positions[owner] + place, starts=starts)


class _Idle:
    """A state of vLLM's sampler that no request uses."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: 0


class Machine:
    """vLLM's samplers of one release for a set of requests."""

    def __init__(self, requests: Requests, vocab: int, steps: int) -> None:
        self.requests, self.steps = requests, steps
        states = import_module(f"{GPU}.sample.states").SamplingStates(len(requests), vocab)
        for name in ("temperature", "top_k", "top_p"):
            getattr(states, name).np[:] = getattr(requests, name).numpy()
        states.seeds.np[:] = requests.seed.numpy()
        sampler = import_module(f"{GPU}.sample.sampler").Sampler
        self.sampler = sampler.__new__(sampler)
        for name in (
            "penalties_state", "logit_bias_state", "bad_words_state", "logprob_token_ids_state",
            "thinking_budget_state",
        ):  # fmt: skip
            setattr(self.sampler, name, _Idle())
        vars(self.sampler).update(
            logprobs_mode="raw_logprobs",
            compute_nans=False,
            use_fp64_gumbel=False,
            sampling_states=states,
            req_states=SimpleNamespace(prefill_len=Memory(len(requests), torch.int32)),
            logits_processors=[],
            trace_replay_state=None,
            needs_logits_processing=np.ones(len(requests), dtype=bool),
            num_speculative_tokens=steps,
            return_sampling_mask=False,
            use_flashinfer=False,
            use_xpu_sampler=False,
        )
        given = SimpleNamespace(
            num_speculative_tokens=steps,
            rejection_sample_method="standard",
            enable_adaptive_verification=False,
            fly_entropy_threshold=0.3,
            fly_entropy_top_k=3,
        )
        rejection = import_module(f"{GPU}.spec_decode.rejection_sampler").RejectionSampler
        self.verifier = rejection(self.sampler, given, torch.device("cpu"))
        self.speculator = import_module(f"{GPU}.spec_decode.speculator").DraftModelSpeculator

    def plain(self, logits: Tensor, at: Rows) -> Any:
        """Draw each row as a plain step of its request does; vLLM's sampler."""
        none = torch.zeros_like(at.place)
        alone = replace(at, place=none, starts=torch.arange(len(at) + 1))
        return self.sampler(logits, _batch(alone, at.owner, none))

    def verify(self, logits: Tensor, at: Rows, fed: Tensor) -> Any:
        """Verify drafts; `fed[i]` is the token fed at row i. vLLM's rejection sampler."""
        owners = torch.arange(len(self.requests))
        return self.verifier(logits, _batch(at, owners, fed), None)

    def draft(self, logits: Tensor, owner: Tensor, position: Tensor) -> Tensor:
        """Draw a draft from each row of a drafter's logits, to stand after `position`."""
        made = SimpleNamespace(
            compute_draft_logits=lambda hidden, _step: hidden,
            _maybe_predict_acceptance=lambda *_: None,
            use_fp64_gumbel=False,
        )
        given = self.requests.temperature, self.requests.seed
        return self.speculator.sample_draft(
            made, logits, position, owner, *given, torch.tensor(0), None
        )


def _batch(at: Rows, owners: Tensor, fed: Tensor) -> SimpleNamespace:
    """Return what the samplers read of vLLM's InputBatch."""
    count = len(owners)
    return SimpleNamespace(
        num_reqs=count,
        expanded_idx_mapping=at.owner.to(torch.int32),
        idx_mapping=owners.to(torch.int32),
        idx_mapping_np=owners.numpy(),
        cu_num_logits=at.starts.to(torch.int32),
        cu_num_logits_np=at.starts.numpy(),
        expanded_local_pos=at.place.to(torch.int32),
        positions=at.position,
        input_ids=fed.to(torch.int32),
        logits_indices=torch.arange(len(at)),
        seq_lens=torch.full((count,), 1 << 20, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.full((count,), 1 << 20, dtype=torch.int32),
    )
