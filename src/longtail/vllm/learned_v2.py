"""The learned drafter in vLLM's Model Runner V2: a speculator without a model or a cache.

vLLM's configuration names its n-gram search, the other drafter that has neither; `init_speculator`
makes this one. Nothing here waits for the device. Known functions: vLLM 0.32 and 0.33.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longtail.vllm.coupled_v2 import target_draw
from longtail.vllm.learned import Learned, Step
from longtail.vllm.patching import Patch, check, learning, module_of

_GPU = "vllm.v1.worker.gpu"


def patches() -> list[Patch]:
    """Return the replacements; ConfigError if a function is not a known one."""
    runner = module_of(f"{_GPU}.model_runner")
    base = module_of(f"{_GPU}.spec_decode.speculator", "BaseSpeculator")
    check(
        base,
        "propose",
        "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states "
        "num_sampled num_rejected last_sampled next_prefill_tokens temperature seeds",
        then="dp_sync_state dummy_run skip_attn_for_dummy_run mm_inputs is_profile "
        "num_speculative_tokens",
    )
    draw = target_draw()
    made: Any = type("LearnedSpeculator", (LearnedSpeculator, base), {})

    def init_speculator(stock: Callable[..., Any], vllm_config: Any, *given: Any) -> Any:
        """Make the learned drafter for an engine that asks for it (vLLM calls it)."""
        if not learning(vllm_config):
            return stock(vllm_config, *given)
        return made(vllm_config, *given, draw)

    known = "vllm_config device req_states"
    return [Patch.of(runner, "init_speculator", known, init_speculator)]


class LearnedSpeculator:
    """Made by the runner as its speculator."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self, vllm_config: Any, device: torch.device, req_states: Any, draw: Callable[..., Tensor]
    ) -> None:
        self._requests, self._draw = req_states, draw
        self.num_speculative_steps: int = vllm_config.speculative_config.num_speculative_tokens
        shape = vllm_config.scheduler_config.max_num_seqs, self.num_speculative_steps
        self._drafts = torch.zeros(shape, device=device, dtype=torch.int64)
        self.learned: Learned | None = None

    def capture(self, *_: Any) -> None:
        """Do nothing (vLLM calls it): it has no model to capture."""

    init_cudagraph_manager = capture

    def draw(self, logits: Tensor, ids: Tensor, *where: Tensor | None) -> Tensor:
        """Draw as the target will: noise is keyed by a token's place among all, and by `at`."""
        assert self.learned is not None, "vLLM loads the model first"
        shape = len(logits), self.learned.block.parts.vocab_size
        full = torch.full(shape, -torch.inf, device=logits.device)
        full[:, ids] = logits.float()
        return self._draw(full, *where, apply_temperature=True)

    @torch.inference_mode()
    def propose(  # noqa: PLR0913  (vLLM's signature)
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **_options: Any,
    ) -> Tensor:
        """Learn from a step and return drafts; where there are none, the newest token stands in."""
        drafts = self._drafts[: input_batch.num_reqs]
        if dummy_run or self.learned is None:
            return drafts
        depth = num_speculative_tokens
        depth = self.num_speculative_steps if depth is None else depth
        sequences, requests, running = self.learned.sequences, self._requests, input_batch.num_reqs
        names, places = input_batch.req_ids[:running], input_batch.idx_mapping_np[:running]
        prompt_lens = requests.prompt_len.np[places].tolist()
        for index in sequences.keep(requests.req_id_to_index, names):
            length = int(requests.prefill_len.np[places[index]])
            sequence = requests.all_token_ids.gpu[places[index], :length]
            sequences.begin(names[index], sequence, prompt_lens[index])
        # With the tokens of this step, refused ones among them, and the newest.
        lengths = (input_batch.seq_lens_cpu_upper_bound[:running] + 1).tolist()
        step = Step(
            states=last_hidden_states,
            tokens=input_batch.input_ids,
            positions=input_batch.positions,
            bounds=input_batch.query_start_loc,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            places=input_batch.idx_mapping,
            newest=last_sampled.view(-1),
            temperature=temperature,
            seeds=seeds,
        )
        return self.learned.step(step, sequences.given(names, prompt_lens, lengths), depth)[:, 1:]
