"""Another engine in a process of its own, driven by JSON lines; run by path, without longtail.

    python -I peer_worker.py {"kind": "vllm", "model_dir": ..., ...}     as `peers.PeerSpec`

    --> {"prompts": [[1, 2], [3]], "new_tokens": 64}       one line a turn on standard input
    <-- {"ready": "vllm 0.32.0, ..."}                      once, when the model is loaded
    <-- {"seconds": 0.8, "cpu_seconds": 0.8, "num_tokens": 128}

KIND is `generate` (transformers) or `vllm`; the standard library and that package are all it
imports. Both sample at temperature 1, without truncation, end-of-sequence token or text.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], int]
"""Prompts and new tokens of each -> tokens generated in total."""


def load_generate(spec: dict[str, Any]) -> tuple[str, Generate]:
    """Load `transformers`: dynamic cache and SDPA, its fastest eager mode on a CPU."""
    import torch
    import transformers

    torch.set_num_threads(spec["threads"])
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        spec["model_dir"], dtype=getattr(torch, spec["dtype"]), attn_implementation="sdpa"
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


def load_vllm(spec: dict[str, Any]) -> tuple[str, Generate]:
    """Load vLLM with its engine in this process and compiled, its fastest mode on one thread.

    A separate engine process would need a core of its own: on a shared one it is a third slower.
    """
    cpus = sorted(os.sched_getaffinity(0))[: spec["threads"]] if sys.platform == "linux" else []
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cpus)) or "nobind",
        VLLM_NO_USAGE_STATS="1",
    )
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    import vllm

    engine = vllm.LLM(
        model=spec["model_dir"],
        skip_tokenizer_init=True,
        dtype=spec["dtype"],
        max_model_len=spec["max_len"],
        max_num_seqs=spec["max_batch"],
        disable_log_stats=True,
        seed=0,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> int:
        params = vllm.SamplingParams(
            temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        engine.reset_prefix_cache()  # the prompts of every turn are the same
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = engine.generate(inputs, params, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in done)

    return f"vllm {vllm.__version__}, in process, compiled", generate


def main(spec: dict[str, Any]) -> None:
    """Load the engine, then serve turns until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the engine goes to the log
    load = {"vllm": load_vllm, "generate": load_generate}[spec["kind"]]
    description, generate = load(spec)
    print(json.dumps({"ready": description}), file=replies, flush=True)
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
    main(json.loads(sys.argv[1]))
