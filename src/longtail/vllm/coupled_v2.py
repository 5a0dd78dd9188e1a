"""Coupled drafts in vLLM's V2 model runner: verification, the draw of drafts, truncation.

V2 draws every token by Gumbel-max with noise keyed by the request's seed, the position and the
token id. Its verification is a probability-ratio test, so it salts the noise of drafts to keep it
apart from the target's. Here each verified row draws as plain decoding would, a draft is accepted
if it equals that draw, and drafts are drawn with the target's noise. So a text is a function of
logits, sampling parameters and seed, whatever is drafted, and no cache of draft logits is needed.

Known functions: vLLM 0.29 to 0.33. Nothing here waits for the device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from longtail.vllm.coupled_v1 import match
from longtail.vllm.patching import Patch, check, module_of

_GPU = "vllm.v1.worker.gpu"


def patches() -> list[Patch]:
    """Return the replacements for this vLLM; ConfigError if a function is not a known one."""
    rejection = module_of(f"{_GPU}.spec_decode.rejection_sampler")
    verified = (
        "target_logits draft_logits draft_sampled cu_num_logits pos idx_mapping "
        "expanded_idx_mapping expanded_local_pos temperature seed num_speculative_steps "
        "synthetic_conditional_rates use_fp64"
    )
    features = (
        "use_block_verification contexts watermarking watermarking_skip_mask watermark_key "
        "fly_window_size fly_entropy_threshold fly_entropy_top_k"
    )
    speculator = module_of(f"{_GPU}.spec_decode.speculator").DraftModelSpeculator
    drafts = (
        "self hidden_states sample_src_positions idx_mapping temperature seeds draft_step "
        "draft_logits"
    )
    draw, steps = target_draw(), "spec_step_idx num_steps"
    verify, propose = partial(_rejection_sample, draw), partial(_sample_draft, draw)
    return [
        Patch.of(rejection, "rejection_sample", verified, verify, features),
        Patch.of(speculator, "sample_draft", drafts, propose, steps),
        *_truncation(),
        *_without_fused_samplers(),
    ]


def target_draw() -> Callable[..., Tensor]:
    """Return vLLM's draw with the target's noise, which is for drafts, too."""
    gumbel_sample = check(
        module_of(f"{_GPU}.sample.gumbel"),
        "gumbel_sample",
        "logits expanded_idx_mapping temperature seed pos apply_temperature",
        then="is_drafting logits_cache logits_cache_col logits_cache_source use_fp64 "
        "output_processed_logits output_processed_logits_col",
    )
    return partial(gumbel_sample, is_drafting=False)


def _rejection_sample(  # noqa: PLR0913  (vLLM's signature)
    draw: Callable[..., Tensor],
    _stock: Any,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    cu_num_logits: Tensor,
    pos: Tensor,
    idx_mapping: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temperature: Tensor,
    seed: Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: Tensor | None = None,
    use_fp64: bool = False,
    **_features: Any,
) -> tuple[Tensor, Tensor]:
    """Draw each row as plain decoding would and keep drafts while they match (vLLM calls it).

    `target_logits` have temperature and truncation applied. Features are off: `guards.admit`.
    """
    given = target_logits, expanded_idx_mapping, temperature, seed, pos
    drawn = draw(*given, apply_temperature=False, use_fp64=use_fp64)
    # A row holds the draft for the row before it; a request's first one holds none.
    starts, counts = cu_num_logits[:-1], cu_num_logits.diff() - 1
    tokens, standing = match(drawn, draft_sampled.roll(-1), starts, counts, num_speculative_steps)
    return tokens, standing.add(1).to(torch.int32)


def _sample_draft(  # noqa: PLR0913  (vLLM's signature)
    draw: Callable[..., Tensor],
    _stock: Any,
    self: Any,
    hidden_states: Tensor,
    sample_src_positions: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    draft_step: Tensor,
    draft_logits: Tensor | None,
    spec_step_idx: int = 0,
    num_steps: int = 1,
) -> Tensor:
    """Draw drafts with the target's noise, which is keyed by the position before the token."""
    if hasattr(self, "compute_draft_logits"):  # since vLLM 0.32
        logits = self.compute_draft_logits(hidden_states, spec_step_idx)
    else:
        logits = self.model.compute_logits(hidden_states)
    given = logits, idx_mapping, temperature, seeds, sample_src_positions
    drafts = draw(*given, apply_temperature=True, use_fp64=self.use_fp64_gumbel)
    if hasattr(self, "_maybe_predict_acceptance"):  # since vLLM 0.30
        self._maybe_predict_acceptance(logits, idx_mapping, draft_step)
    return drafts


def _truncation() -> list[Patch]:
    """Return replacements that truncate by one kernel, whatever the number of rows.

    vLLM chooses between kernels by the number of rows, and they add up top-p in another order. A
    verified step has more rows than a plain one, so a token at the edge of top-p could survive in
    one of them only.
    """
    kernels = module_of("vllm.v1.sample.ops.topk_topp_triton")
    options = "mask_value has_topp_only_rows"
    kernel = check(kernels, "apply_top_k_top_p_triton", "logits k p", then=options)
    few = getattr(kernels, "_SPLIT_MAX_BATCH", 0)  # rows up to which another kernel serves top-p

    def apply_top_k_top_p(
        _stock: Any, logits: Tensor, k: Tensor | None, p: Tensor | None, **options: Any
    ) -> Tensor:
        """Truncate rows by top-k, then top-p (vLLM calls it)."""
        if k is None and p is None:
            return logits
        rows, missing = len(logits), few + 1 - len(logits)
        if p is None or missing <= 0:
            return kernel(logits, k, p, **options)
        k = None if k is None else pad(k, (0, missing), value=logits.shape[1])
        logits, p = pad(logits, (0, 0, 0, missing)), pad(p, (0, missing), value=1)
        return kernel(logits, k, p, **options)[:rows]

    given = "apply_top_k_top_p", "logits k p", apply_top_k_top_p, "has_topp_only_rows"
    return [Patch.of(module_of(f"{_GPU}.sample.{name}"), *given) for name in ("states", "sampler")]


def _without_fused_samplers() -> list[Patch]:
    """Return replacements that have V2's sampler draw by keyed noise in plain steps, too.

    Fused samplers of FlashInfer and XPU draw truncated rows of requests without a seed by noise of
    their own. vLLM gives such a request a random seed, which is then the one its text depends on.
    """
    sampler = module_of(f"{_GPU}.sample.sampler")
    names = ("flashinfer_sampler_supported", "xpu_sampler_supported")  # the latter since vLLM 0.31
    found = [name for name in names if hasattr(sampler, name)]
    return [Patch.of(sampler, name, "", lambda _stock: False) for name in found]
