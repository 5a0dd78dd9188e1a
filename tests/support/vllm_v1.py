"""Stand-ins for the modules of vLLM's V1 model runner: its calls and its row order, no model."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.vllm_releases import module

VOCAB = 13


def truncated(logits: torch.Tensor, k: Any, p: Any) -> torch.Tensor:
    """Keep the k best of each row, as vLLM's apply_top_k_top_p."""
    if k is None:
        return logits
    k.max()  # vLLM's own fails here without rows
    least = torch.stack([row.topk(int(n)).values[-1] for row, n in zip(logits, k, strict=True)])
    return logits.masked_fill(logits < least[:, None], -torch.inf)


def lost(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    """Return what the defective kernel leaves: memory that nothing was written to."""
    return torch.full((num_tokens,), -77.0)


class TopKTopPSampler(torch.nn.Module):
    logprobs_mode = "processed_logprobs"

    def forward_native(self, logits, generators, k, p):
        return logits.argmax(-1), None

    def forward(self, logits, generators, k, p):
        return self.forward_native(logits, generators, k, p)


def rejection_sample(
    draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs,
    target_logits, bonus_token_ids, sampling_metadata, synthetic_mode=False,
):  # fmt: skip
    raise AssertionError("vLLM's own verification was called")


def install(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put the stand-ins in place of vLLM's modules and return the classes and modules."""

    def apply_sampling_constraints(logits, cu_num_draft_tokens, sampling_metadata):
        ends = cu_num_draft_tokens
        heat = rejection.expand_batch_to_tokens(
            sampling_metadata.temperature, ends, len(logits), 0, 1
        )
        k = sampling_metadata.top_k
        counts = ends.diff(prepend=torch.zeros(1, dtype=ends.dtype)).long()
        k = None if k is None else k.repeat_interleave(counts)
        return sampler.apply_top_k_top_p(logits / heat[:, None], k, None)

    class GPUModelRunner:
        def __init__(self, vllm_config, device):
            self.device, self.vllm_config = torch.device(device), vllm_config
            self.requests, self.drafter = {}, None
            self.sampler = sampler.TopKTopPSampler()
            self.positions = torch.zeros(256, dtype=torch.int64)
            self.query_start_loc = SimpleNamespace(gpu=torch.zeros(64, dtype=torch.int32))
            self.input_batch = SimpleNamespace(req_ids=[], sampling_metadata=None, generators={})

        def _sample(self, logits, spec_decode_metadata):
            given, spec = self.input_batch.sampling_metadata, spec_decode_metadata
            heat = torch.where(given.temperature == 0, 1.0, given.temperature)[:, None]
            if spec is None:
                return self.drawn(logits, heat, given)[:, None]
            bonus = self.drawn(logits[spec.bonus_logits_indices], heat, given)[:, None]
            ends = torch.tensor(spec.num_draft_tokens).cumsum(0).to(torch.int32)
            target = rejection.apply_sampling_constraints(
                logits[spec.target_logits_indices], ends, given
            )
            return rejection.rejection_sample(
                spec.draft_token_ids, spec.num_draft_tokens, max(spec.num_draft_tokens), ends, None,
                target, bonus, given, synthetic_mode=False,
            )  # fmt: skip

        def drawn(self, logits, heat, given):
            tokens, _ = self.sampler(logits / heat, {}, given.top_k, None)
            return torch.where(given.temperature == 0, logits.argmax(-1), tokens)

    class CPUModelRunner(GPUModelRunner):
        def load_model(self, load_dummy_weights=False):
            self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
            self.model[0].cpu_linear = torch.nn.functional.linear

    class SpecDecodeBaseProposer:
        uses_mrope = parallel_drafting = False
        pass_hidden_states_to_model = True

        def set_inputs_first_pass(
            self, target_token_ids, next_token_ids, target_positions, target_hidden_states,
            token_indices_to_sample, cad, num_rejected_tokens_gpu,
        ):  # fmt: skip
            self.positions = target_positions
            return len(target_positions), token_indices_to_sample, cad

        def _sample_draft_tokens(self, hidden_states, sampling_metadata):
            return self.model.compute_logits(hidden_states).argmax(-1), None

    class UnquantizedFusedMoEMethod:
        def _setup_kernel(self, layer, w13, w2):
            raise AssertionError("there are no experts")

    sampler = module(
        "vllm.v1.sample.ops.topk_topp_sampler",
        TopKTopPSampler=type("TopKTopPSampler", (TopKTopPSampler,), {}),
        apply_top_k_top_p=truncated,
    )
    rejection = module(
        "vllm.v1.sample.rejection_sampler",
        rejection_sample=rejection_sample,
        expand_batch_to_tokens=lost,
        apply_sampling_constraints=apply_sampling_constraints,
    )
    platform = SimpleNamespace(is_cpu=lambda: True)
    made = {
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": GPUModelRunner},
        "vllm.v1.worker.cpu_model_runner": {"CPUModelRunner": CPUModelRunner},
        "vllm.v1.spec_decode.llm_base_proposer": {"SpecDecodeBaseProposer": SpecDecodeBaseProposer},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils.dispatcher": {"_rebind_kernels": lambda overrides: None, "vars": vars},
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": {
            "UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod
        },
    }
    for each in (sampler, rejection, *(module(name, **items) for name, items in made.items())):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    return SimpleNamespace(
        runner=CPUModelRunner, proposer=SpecDecodeBaseProposer, rejection=rejection,
        sampler=sampler,
    )  # fmt: skip
