"""vLLM with one rule of drafting, in a process of its own; run by path.

    python -I rules_worker.py {"target": DIR, "drafter": DIR, "rule": "coupled", ...}

    <-- {"ready": "vllm 0.32.0"}                                     once, when it is loaded
    --> {"prompts": [[1, 2]], "seeds": [7], "temperature": 1.0, "max_tokens": 64,
         "stop_token_ids": [1], "adopt": null}
    <-- {"tokens": [[3, 4]], "num_drafts": 10, "num_accepted": 31, "seconds": 1.2,
         "cpu_seconds": 1.2}

The rules:

    plain          longtail's keyed noise, no drafts
    coupled        drafts with the noise of the target, verified by equality
    greedy         vLLM's default: most likely drafts, its own sampler
    probabilistic  vLLM's sampled drafts, verified by the ratio of probabilities

vLLM's own rules run with the defects of its CPU path stepped round, since they would be compared as
noise otherwise. longtail is looked for in this environment, then in the folder `packages`.
"""

import json
import os
import sys
import time
from typing import Any


def main(spec: dict[str, Any]) -> None:
    """Load the engine, then serve turns until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of vLLM goes to the log
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", LONGTAIL_VLLM="")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    sys.path.append(spec["packages"])  # behind the packages of this environment
    engine = load(spec)
    import vllm

    print(json.dumps({"ready": f"vllm {vllm.__version__}"}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(engine, json.loads(line))), file=replies, flush=True)


def load(spec: dict[str, Any]) -> Any:
    """Start vLLM with the plugin, or with its CPU defects stepped round."""
    from longtail.integrations.vllm import guards, plugin, v1_cpu

    plugin.register()
    import vllm

    rule = spec["rule"]
    options: dict[str, Any] = {}
    if rule in ("plain", "coupled"):
        rows = spec["block_rows"] or None
        options["additional_config"] = {"longtail": {"block_rows": rows}}
    elif v1_cpu.is_cpu():
        guards.replace(v1_cpu.defects())
    if rule != "plain":
        options["speculative_config"] = {
            "method": spec["method"],
            "model": spec["drafter"],
            "num_speculative_tokens": spec["depth"],
            "draft_sample_method": "probabilistic" if rule == "probabilistic" else "greedy",
        }
    return vllm.LLM(
        model=spec["target"],
        skip_tokenizer_init=True,
        dtype=spec["dtype"],
        max_model_len=spec["max_len"],
        max_num_seqs=spec["max_running"],
        enable_prefix_caching=False,  # turns repeat their prompts
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
        **options,
    )


def serve(engine: Any, turn: dict[str, Any]) -> dict[str, Any]:
    """Generate for all prompts and count drafts."""
    before = counts(engine)
    start, cpu_start = time.perf_counter(), time.process_time()
    tokens = generate(engine, turn)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    drafts, accepted = (now - then for now, then in zip(counts(engine), before, strict=True))
    return {
        "tokens": tokens,
        "num_drafts": drafts,
        "num_accepted": accepted,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }


def generate(engine: Any, turn: dict[str, Any]) -> list[list[int]]:
    """Step until all requests are done; adopt a drafter when half of them are."""
    import vllm

    core = engine.llm_engine
    for index, (prompt, seed) in enumerate(zip(turn["prompts"], turn["seeds"], strict=True)):
        params = vllm.SamplingParams(
            temperature=turn["temperature"],
            seed=seed,
            max_tokens=turn["max_tokens"],
            stop_token_ids=turn["stop_token_ids"],
            detokenize=False,
        )
        core.add_request(str(index), {"prompt_token_ids": prompt}, params)
    done: dict[int, list[int]] = {}
    adopt = turn["adopt"]
    while core.has_unfinished_requests():
        for each in core.step():
            if each.finished:
                done[int(each.request_id)] = list(each.outputs[0].token_ids)
        if adopt is not None and 2 * len(done) >= len(turn["prompts"]):
            from longtail.integrations.vllm.adopt import adopt_drafter

            adopt_drafter(engine, adopt)
            adopt = None
    return [done[index] for index in range(len(turn["prompts"]))]


def counts(engine: Any) -> tuple[int, int]:
    """Return vLLM's counters of drafts and of accepted tokens."""
    found = {metric.name: metric for metric in engine.get_metrics()}
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    first, second = (found[name].value if name in found else 0 for name in names)
    return first, second


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
