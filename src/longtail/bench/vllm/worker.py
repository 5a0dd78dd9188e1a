"""vLLM with an exported drafter, in a process of its own; run by path, maybe elsewhere.

    python -I vllm_worker.py        one JSON object on standard input, one on standard output

    --> {"target": DIR, "drafter": DIR or null, "method": "eagle3", "depth": 4, "dtype": "float32",
         "prompts": [[1, 2]], "max_tokens": 64, "stop_token_ids": [1], "max_len": 512}
    <-- {"engine": "vllm 0.32.0", "tokens": [[3, 4]], "num_drafts": 10, "num_accepted": 31,
         "accepted_by_position": [9, 8, 8, 6], "seconds": 1.5}

The interpreter need not have longtail: the standard library and vLLM are all it imports. Greedy,
eager (nothing is compiled: counts are wanted, not speed), without text.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Serve one request for all."""
    asked = json.load(sys.stdin)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints goes to the log
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    print(json.dumps(serve(asked)), file=replies, flush=True)


def serve(asked: dict[str, Any]) -> dict[str, Any]:
    """Load, generate, count."""
    import vllm

    speculative = None
    if asked["drafter"] is not None:
        speculative = {
            "method": asked["method"],
            "model": asked["drafter"],
            "num_speculative_tokens": asked["depth"],
        }
    engine = vllm.LLM(
        model=asked["target"],
        skip_tokenizer_init=True,
        dtype=asked["dtype"],
        max_model_len=asked["max_len"],
        max_num_seqs=8,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=speculative,
        seed=0,
    )
    params = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=asked["max_tokens"],
        stop_token_ids=asked["stop_token_ids"],
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    began = time.perf_counter()
    done = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    counts = {metric.name: metric for metric in engine.get_metrics()}

    def count(name: str) -> Any:
        return counts.get(f"vllm:spec_decode_{name}")

    drafts, accepted = count("num_drafts"), count("num_accepted_tokens")
    by_position = count("num_accepted_tokens_per_pos")
    return {
        "engine": f"vllm {vllm.__version__}",
        "tokens": [list(each.outputs[0].token_ids) for each in done],
        "num_drafts": 0 if drafts is None else drafts.value,
        "num_accepted": 0 if accepted is None else accepted.value,
        "accepted_by_position": [] if by_position is None else list(by_position.values),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
