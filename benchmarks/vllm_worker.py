"""vLLM in a process of its own, driven by JSON lines; run by path.

    python -I vllm_worker.py {"model_dir": DIR, "dtype": "bfloat16", "threads": 1, "max_len": 512,
                              "max_running": 32}

    <-- {"ready": "vllm 0.32.0, ..."}                  once, when the model is loaded
    --> {"prompts": [[1, 2], [3]], "lengths": [64, 12], "running": 8}
    <-- {"seconds": 0.8, "cpu_seconds": 0.8, "num_tokens": 76}

It samples at temperature 1, without truncation, and writes as many tokens after each prompt as
`lengths` has, at most `running` texts at a time.

With a `rule` (with `drafter`, `method`, `depth`, `packages`, and `arguments` of vLLM) texts end by
themselves, a turn has `seeds`, `temperature` and `stop_token_ids`, too, and the answer has
`tokens`, `num_drafts` and `num_accepted`. `vllm_engine.py` lists the rules.

vLLM's own rules run with the defects of its CPU path worked around, since noise would be compared
otherwise. Only rules import longtail: from this environment, else from the folder `packages`.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[dict[str, Any]], dict[str, Any]]
"""A turn -> what is answered beside its seconds."""


def load_vllm(spec: dict[str, Any]) -> tuple[str, Generate]:
    """Load vLLM with its engine in this process: a separate one would need a core of its own.

    Without a rule it is compiled, its fastest mode on one thread.
    """
    cpus = sorted(os.sched_getaffinity(0))[: spec["threads"]] if sys.platform == "linux" else []
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cpus)) or "nobind",
        VLLM_NO_USAGE_STATS="1",
        LONGTAIL_VLLM="",
    )
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if spec.get("rule") == "loop":
        return load_loop(spec)
    more = drafting(spec) if "rule" in spec else {"disable_log_stats": True}
    import vllm

    arguments = {
        "model": spec["model_dir"],
        "skip_tokenizer_init": True,
        "dtype": spec["dtype"],
        "max_model_len": spec["max_len"],
        "max_num_seqs": spec["max_running"],
        "enable_prefix_caching": False,  # turns repeat their prompts
        "seed": 0,
        **more,
    }
    engine = vllm.LLM(**(arguments | spec.get("arguments", {})))

    def generate(turn: dict[str, Any]) -> dict[str, Any]:
        before = draft_counts(engine)
        tokens = serve(engine, turn)
        drafts, accepted = (a - b for a, b in zip(draft_counts(engine), before, strict=True))
        found = {"num_tokens": sum(map(len, tokens)), "num_drafts": drafts}
        return {**found, "num_accepted": accepted, "tokens": tokens}

    mode = "" if "rule" in spec else ", in process, compiled"
    return f"vllm {vllm.__version__}{mode}", generate


def load_loop(spec: dict[str, Any]) -> tuple[str, Generate]:
    """Load vLLM as longtail's generator."""
    sys.path.append(spec["packages"])  # behind the packages of this environment
    from pathlib import Path

    import torch

    from longtail.engine.request import EngineLimits
    from longtail.types import Request, SamplingParams
    from longtail.vllm.generator import VllmGenerator

    running, longest = spec["max_running"], spec["max_len"]
    generator = VllmGenerator(
        Path(spec["model_dir"]),
        lambda tokens: "",
        EngineLimits(max_running=running, max_step_tokens=2048, max_len=longest),
        dtype=getattr(torch, spec["dtype"]),
        options={"enable_prefix_caching": False, **spec["arguments"]},
    )

    def generate(turn: dict[str, Any]) -> dict[str, Any]:
        ends = tuple(turn["stop_token_ids"])
        requests = [
            Request(
                request_id=f"{number}",
                prompt_tokens=tuple(prompt),
                noise_key=seed,
                sampling=SamplingParams(
                    temperature=turn["temperature"], max_tokens=length, stop_token_ids=ends
                ),
            )
            for number, (prompt, seed, length) in enumerate(
                zip(turn["prompts"], turn["seeds"], turn["lengths"], strict=True)
            )
        ]
        tokens = [list(each.tokens) for each in generator.generate(requests)]
        counts = {"num_tokens": sum(map(len, tokens)), "num_drafts": 0, "num_accepted": 0}
        return {**counts, "tokens": tokens}

    return "vllm, by longtail's generator", generate


def drafting(spec: dict[str, Any]) -> dict[str, Any]:
    """Register longtail's plugin; return vLLM's options for a rule."""
    sys.path.append(spec["packages"])  # behind the packages of this environment
    from longtail.vllm import cpu_fixes, patching, plugin

    plugin.register()
    rule = spec["rule"]
    options: dict[str, Any] = {"enforce_eager": cpu_fixes.is_cpu(), "disable_log_stats": False}
    if rule in ("plain", "learned", "coupled"):
        learns = rule == "learned"
        own = {"drafter": "learned", "depth": spec["depth"]} if learns else {}
        options["additional_config"] = {"longtail": own}
    elif cpu_fixes.is_cpu():
        patching.replace(cpu_fixes.defects())
    if rule not in ("plain", "learned"):
        options["speculative_config"] = {
            "method": spec["method"],
            "model": spec["drafter"],
            "num_speculative_tokens": spec["depth"],
            "draft_sample_method": "probabilistic" if rule == "probabilistic" else "greedy",
        }
    return options


def serve(engine: Any, turn: dict[str, Any]) -> list[list[int]]:
    """Step until all texts are written, at most `running` at a time."""
    import vllm

    core, prompts = engine.llm_engine, turn["prompts"]
    done: dict[int, list[int]] = {}
    started = 0
    while len(done) < len(prompts):
        while started < len(prompts) and started - len(done) < turn["running"]:
            params = vllm.SamplingParams(
                temperature=turn.get("temperature", 1.0),
                seed=turn["seeds"][started] if "seeds" in turn else None,
                max_tokens=turn["lengths"][started],
                ignore_eos=True,
                stop_token_ids=turn.get("stop_token_ids", []),
                detokenize=False,
            )
            core.add_request(str(started), {"prompt_token_ids": prompts[started]}, params)
            started += 1
        for each in core.step():
            if each.finished:
                done[int(each.request_id)] = list(each.outputs[0].token_ids)
    return [done[index] for index in range(len(prompts))]


def draft_counts(engine: Any) -> tuple[int, int]:
    """Return vLLM's counters of drafts and of accepted tokens; 0 where it keeps none."""
    if not engine.llm_engine.log_stats:
        return 0, 0
    found = {metric.name: metric for metric in engine.get_metrics()}
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    first, second = (found[name].value if name in found else 0 for name in names)
    return first, second


def main(spec: dict[str, Any]) -> None:
    """Load the engine, then serve turns until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the engine goes to the log
    description, generate = load_vllm(spec)
    print(json.dumps({"ready": description}), file=replies, flush=True)
    for line in sys.stdin:
        turn = json.loads(line)
        start, cpu_start = time.perf_counter(), time.process_time()
        found = generate(turn)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        reply = {"seconds": seconds, "cpu_seconds": cpu_seconds, **found}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
