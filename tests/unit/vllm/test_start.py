from pathlib import Path

import pytest

from longtail.engine.request import EngineLimits
from longtail.vllm.run_drafter import MAX_DEPTH
from longtail.vllm.start import start_error, step_tokens

FIELDS = {
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
    "initializing the engine.": "raise rollout.vllm.gpu_memory_utilization",
    "Free memory on device cuda:0 (20.0/79.1 GiB) on startup is less than desired GPU memory "
    "utilization (0.9, 71.2 GiB).": "lower rollout.vllm.gpu_memory_utilization",
    "CUDA out of memory. Tried to allocate 2.00 GiB.": "lower rollout.vllm.gpu_memory_utilization",
    "Total number of attention heads (14) must be divisible by tensor parallel size (4).": (
        "rollout.vllm.tensor_parallel_size"
    ),
    "Bfloat16 is only supported on GPUs with compute capability of at least 8.0.": "rollout.dtype",
    "libcudart.so.13: cannot open shared object file: No such file or directory": "this machine's",
    "": "change rollout.vllm, or use another model",
}
"""Errors of vLLM 0.32's start, and words of the remedy in each."""


@pytest.mark.parametrize("said", FIELDS)
def test_an_error_of_vllms_start_is_one_sentence_with_the_field_to_change(said: str) -> None:
    told = str(start_error(Path("model"), RuntimeError(f"{said}\n{'more ' * 200}" if said else "")))
    assert "\n" not in told
    assert len(told) < 500
    assert FIELDS[said] in told


@pytest.mark.parametrize(("own", "prompts"), [(512, 8192), (20_000, 20_000)])
def test_a_step_on_a_gpu_has_room_for_prompts_beside_all_drafts(own: int, prompts: int) -> None:
    limits = EngineLimits(max_running=256, max_step_tokens=own, max_len=4096)
    assert step_tokens(limits, on_cpu=False) == prompts + 256 * (1 + MAX_DEPTH)
    assert step_tokens(limits, on_cpu=True) == own
