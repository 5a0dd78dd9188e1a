"""vLLM with an exported drafter, in a process of its own; run by path, without longtail.

    python -I worker.py        one JSON object on standard input, one on standard output

    --> {"target": DIR, "drafter": DIR, "method": "eagle3", "depth": 4, "dtype": "float32",
         "prompts": [[1, 2]], "max_tokens": 64, "stop_token_ids": [1], "max_len": 512}
    <-- {"engine": "vllm 0.32.0", "tokens": [[3, 4]], "num_drafts": 10, "num_accepted": 31}

The standard library and vLLM are all it imports. Greedy and eager (counts are wanted, not speed).
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    """Run one job."""
    job = json.load(sys.stdin)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of vLLM goes to the log
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    print(json.dumps(serve(job)), file=replies, flush=True)


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Generate with drafts and count them."""
    import vllm

    engine = vllm.LLM(
        model=job["target"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        max_model_len=job["max_len"],
        max_num_seqs=8,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={
            "method": job["method"],
            "model": job["drafter"],
            "num_speculative_tokens": job["depth"],
        },
        seed=0,
    )
    params = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=job["max_tokens"],
        stop_token_ids=job["stop_token_ids"],
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    done = engine.generate(prompts, params, use_tqdm=False)
    metrics = {metric.name: metric for metric in engine.get_metrics()}
    drafts = metrics.get("vllm:spec_decode_num_drafts")
    accepted = metrics.get("vllm:spec_decode_num_accepted_tokens")
    return {
        "engine": f"vllm {vllm.__version__}",
        "tokens": [list(each.outputs[0].token_ids) for each in done],
        "num_drafts": 0 if drafts is None else drafts.value,
        "num_accepted": 0 if accepted is None else accepted.value,
    }


if __name__ == "__main__":
    main()
