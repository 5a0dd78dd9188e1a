"""Model Runner V2 on the CPU, with its kernels under Triton's interpreter: the wheel runs V1."""

import os
import runpy
from typing import Any


def choose() -> None:
    """Let vLLM run V2 and schedule ahead as on a GPU; before anything of vLLM is imported."""
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1", CUDA_VISIBLE_DEVICES="")
    from vllm import platforms

    assert platforms.current_platform.is_cpu()
    matches = platforms.vllm_version_matches_substr
    platforms.vllm_version_matches_substr = lambda part: False  # a CPU's Triton must compile
    import vllm.triton_utils  # noqa: F401

    platforms.vllm_version_matches_substr = matches
    from vllm.v1.sample.ops import topk_topp_sampler, topk_topp_triton

    def truncate(logits: Any, k: Any, p: Any) -> Any:
        return topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, p)

    for module in (topk_topp_sampler, topk_topp_triton):  # the interpreter cannot run the kernel
        module.apply_top_k_top_p_triton = truncate
    platform = type(platforms.current_platform)
    stock = platform.check_and_update_config.__func__

    def check_and_update_config(cls: type, config: Any) -> None:
        scheduler = config.scheduler_config
        ahead = scheduler.async_scheduling
        stock(cls, config)
        scheduler.async_scheduling = ahead

    platform.check_and_update_config = classmethod(check_and_update_config)


if __name__ == "__main__":
    choose()
    runpy.run_module("longtail.cli.main", run_name="__main__")
