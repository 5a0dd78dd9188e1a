"""A rival engine in a process of its own, driven by JSON lines; run by path, maybe elsewhere.

    python -I peer_worker.py KIND MODEL_DIR DTYPE THREADS MAX_LEN MAX_BATCH

    --> {"prompts": [[1, 2], [3]], "new_tokens": 64}       one line a turn on standard input
    <-- {"ready": "vllm 0.32.0, ..."}                      once, when the model is loaded
    <-- {"seconds": 0.8, "cpu_seconds": 0.8, "num_tokens": 128}

KIND is `generate` (transformers) or `vllm`. The interpreter need not have longtail: the standard
library and the rival are all it imports. Both sample alike: temperature 1, no truncation, no
end-of-sequence token, no text. Between turns it waits for a line, next to idle (vLLM's background
threads take under 1% of a core).
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], int]
"""Prompts and new tokens of each -> tokens generated in total."""


def load_generate(model_dir: str, dtype: str, threads: int) -> tuple[str, Generate]:
    """Load `transformers`: dynamic cache and SDPA, its fastest eager setting on a CPU."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    model.eval()

    def generate(prompts: list[list[int]], new_tokens: int) -> int:
        tokens = torch.tensor(prompts)
        settings = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
            eos_token_id=None,
        )
        with torch.inference_mode():
            out = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), generation_config=settings
            )
        return (out.shape[1] - tokens.shape[1]) * len(prompts)

    return f"transformers {transformers.__version__}, dynamic cache, sdpa", generate


def load_vllm(
    model_dir: str, dtype: str, threads: int, max_len: int, max_batch: int
) -> tuple[str, Generate]:
    """Load vLLM with its engine in this process and compiled, its fastest setting on one thread.

    A separate engine process would need a core of its own: on a shared one it is a third slower.
    """
    cpus = sorted(os.sched_getaffinity(0))[:threads] if sys.platform == "linux" else []
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cpus)) or "nobind",
        VLLM_NO_USAGE_STATS="1",
    )
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    import vllm

    engine = vllm.LLM(
        model=model_dir,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=max_len,
        max_num_seqs=max_batch,
        enable_prefix_caching=False,  # the prompts of every turn are the same
        disable_log_stats=True,
        seed=0,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> int:
        params = vllm.SamplingParams(
            temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = engine.generate(asked, params, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in done)

    return f"vllm {vllm.__version__}, in process, compiled", generate


def main(words: list[str]) -> None:
    """Load the rival, then serve turns until standard input ends."""
    kind, model_dir, dtype, threads, max_len, max_batch = words
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the rival prints goes to the log
    if kind == "vllm":
        setting, generate = load_vllm(model_dir, dtype, int(threads), int(max_len), int(max_batch))
    else:
        setting, generate = load_generate(model_dir, dtype, int(threads))
    print(json.dumps({"ready": setting}), file=replies, flush=True)
    for line in sys.stdin:
        turn = json.loads(line)
        start, cpu_start = time.perf_counter(), time.process_time()
        num_tokens = generate(turn["prompts"], turn["new_tokens"])
        reply = {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu_start,
            "num_tokens": num_tokens,
        }
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
