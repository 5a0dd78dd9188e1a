"""The learned drafter in vLLM's Model Runner V2: a speculator without a model or a cache.

vLLM's configuration names its n-gram search, the other drafter that has neither; `init_speculator`
makes this one. Nothing here waits for the device. Known functions: vLLM 0.32 and 0.33.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longtail.vllm.guards import Patch, check, class_of, learning, module_of
from longtail.vllm.learned import Learned, Step
from longtail.vllm.learned_worker import open_learned
from longtail.vllm.v2 import target_draw

_GPU = "vllm.v1.worker.gpu"


def patches() -> list[Patch]:
    """Return the replacements; ConfigError if a function is not a known one."""
    runner = module_of(f"{_GPU}.model_runner")
    base = class_of(f"{_GPU}.spec_decode.speculator", "BaseSpeculator")
    check(
        base,
        "propose",
        "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states "
        "num_sampled num_rejected last_sampled next_prefill_tokens temperature seeds",
        then="dp_sync_state dummy_run skip_attn_for_dummy_run mm_inputs is_profile "
        "num_speculative_tokens",
    )
    make = check(runner, "init_speculator", "vllm_config device req_states")
    draw = target_draw()
    made = type("LearnedSpeculator", (LearnedSpeculator, base), {})

    def init_speculator(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
        """Make the learned drafter for an engine that asks for it (vLLM calls it)."""
        given = vllm_config, device, req_states
        return made(*given, draw) if learning(vllm_config) else make(*given)

    return [Patch(owner=runner, name="init_speculator", replacement=init_speculator)]


class LearnedSpeculator:
    """Made by the runner as its speculator."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self, vllm_config: Any, device: torch.device, req_states: Any, draw: Callable[..., Tensor]
    ) -> None:
        self._config, self._requests = vllm_config, req_states
        self._draw = draw
        self.num_speculative_steps: int = vllm_config.speculative_config.num_speculative_tokens
        shape = vllm_config.scheduler_config.max_num_seqs, self.num_speculative_steps
        self._drafts = torch.zeros(shape, device=device, dtype=torch.int64)
        self.learned: Learned | None = None

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: it has no model to capture."""

    def capture(self) -> None:
        """Do nothing."""

    def open(self, model: Any) -> None:
        """Read the parts of a target that is loaded."""
        self.learned = open_learned(model, self._config, self._drawn)

    def _drawn(self, logits: Tensor, ids: Tensor, *where: Tensor | None) -> Tensor:
        """Draw as the target will: noise is keyed by a token's place among all, and by `at`."""
        assert self.learned is not None, "see open"
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
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """Learn from a step and return drafts; where there are none, the newest token stands in."""
        drafts = self._drafts[: input_batch.num_reqs]
        if dummy_run or self.learned is None:
            return drafts
        depth = num_speculative_tokens
        depth = self.num_speculative_steps if depth is None else depth
        texts, requests, running = self.learned.texts, self._requests, input_batch.num_reqs
        names, places = input_batch.req_ids[:running], input_batch.idx_mapping_np[:running]
        texts.keep(requests.req_id_to_index)
        prompt_lens = requests.prompt_len.np[places].tolist()
        for name, place, prompt_len in zip(names, places, prompt_lens, strict=True):
            if not texts.is_known(name):
                length = int(requests.prefill_len.np[place])
                texts.begin(name, requests.all_token_ids.gpu[place, :length], prompt_len)
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
        return self.learned.step(step, texts.given(names, prompt_lens, lengths), depth)[:, 1:]
