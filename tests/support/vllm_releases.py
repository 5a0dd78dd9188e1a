"""Stand-ins for the modules of vLLM's Model Runner V2, with the parameters of vLLM 0.33."""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

GPU = "vllm.v1.worker.gpu"
PARAMETERS = {
    "rejection_sample": "target_logits draft_logits draft_sampled cu_num_logits pos idx_mapping "
    "expanded_idx_mapping expanded_local_pos temperature seed num_speculative_steps "
    "synthetic_conditional_rates use_fp64 use_block_verification contexts watermarking "
    "watermarking_skip_mask watermark_key fly_window_size fly_entropy_threshold fly_entropy_top_k",
    "sample_draft": "self hidden_states sample_src_positions idx_mapping temperature seeds "
    "draft_step draft_logits spec_step_idx num_steps",
    "gumbel_sample": "logits expanded_idx_mapping temperature seed pos apply_temperature "
    "is_drafting logits_cache logits_cache_col use_fp64 logits_cache_source",
    "apply_top_k_top_p": "logits k p has_topp_only_rows",
    "apply_top_k_top_p_triton": "logits k p mask_value has_topp_only_rows",
}
"""Parameters of the functions that are replaced or called."""


def function(parameters: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """Return `body` with a signature of these names."""

    def call(*args: Any, **options: Any) -> Any:
        return body(*args, **options)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    listed = [inspect.Parameter(name, kind) for name in parameters.split()]
    call.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    return call


def untouched(*_args: Any, **_options: Any) -> Any:
    """Stand for a function of vLLM that must have been replaced."""
    raise AssertionError("vLLM's own function was called")


def module(name: str, **contents: Any) -> ModuleType:
    """Return a module with these contents."""
    made = ModuleType(name)
    vars(made).update(contents)
    return made


def release(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Put stand-ins in the place of vLLM's modules and return them by last name."""
    given = PARAMETERS

    class DraftModelSpeculator:
        sample_draft = function(given["sample_draft"], untouched)

    truncate = function(given["apply_top_k_top_p"], untouched)
    kernel = function(given["apply_top_k_top_p_triton"], lambda logits, *_, **__: logits + 1)
    fused = dict.fromkeys(("flashinfer_sampler_supported", "xpu_sampler_supported"), lambda: 1)
    sampler = module("sampler", apply_top_k_top_p=truncate, **fused)
    made = {
        f"{GPU}.sample.gumbel": module(
            "g", gumbel_sample=function(given["gumbel_sample"], untouched)
        ),
        f"{GPU}.sample.sampler": sampler,
        f"{GPU}.sample.states": module("states", apply_top_k_top_p=truncate),
        f"{GPU}.spec_decode.rejection_sampler": module(
            "rejection_sampler", rejection_sample=function(given["rejection_sample"], untouched)
        ),
        f"{GPU}.spec_decode.speculator": module(
            "speculator", DraftModelSpeculator=DraftModelSpeculator
        ),
        "vllm.v1.sample.ops.topk_topp_triton": module("k", apply_top_k_top_p_triton=kernel),
    }
    for name, each in made.items():
        monkeypatch.setitem(sys.modules, name, each)
    return {name.rpartition(".")[2]: each for name, each in made.items()}
