"""Engines of a vLLM wheel, one after the other in one process; run by path in its environment.

    python -I scenes.py {"target": DIR, "eagle3": DIR, "ridge": DIR, "prompts": [[1, 2]],
                         "seeds": [7], "runner": "v1", "turns": 5, "saved": DIR,
                         "scenes": ["plain", "ridge"]} SRC TESTS

One JSON object on standard output: the texts of every scene, and what it counted.
"""

import gc
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_TOKENS, DEPTH = 48, 4


def main(job: dict[str, Any], *packages: str) -> None:
    """Run all scenes."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    sys.path[:0] = packages
    if job["runner"] == "v2":
        from vllm_wheel import runner_v2

        runner_v2.choose()
    from longtail.vllm import plugin

    plugin.register()
    found = {}
    for name in job["scenes"]:
        print(f"scene {name}", file=sys.stderr, flush=True)
        try:
            found[name] = globals()[name](job)
        except Exception as error:  # noqa: BLE001  (the other scenes are played)
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
        gc.collect()
    print(json.dumps(found), file=replies, flush=True)


@contextmanager
def engine(job: dict[str, Any], drafter: str | None, **options: Any) -> Iterator[Any]:
    """Start vLLM with coupled drafts, or none."""
    import vllm

    from longtail.vllm.plugin import require

    own: dict[str, Any] = {"longtail": {}}
    if drafter == "learned":
        own = {"longtail": {"drafter": "learned", "depth": DEPTH}}
    elif drafter == "stock":
        own = {}
    elif drafter is not None:
        methods = {"ridge": "eagle", "target": "draft_model", "mtp": "mtp"}
        options["speculative_config"] = {
            "method": methods.get(drafter, "eagle3"),
            "model": job[drafter],
            "num_speculative_tokens": DEPTH,
        }
    llm = vllm.LLM(
        model=job["target"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=options.pop("max_num_seqs", 8),
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
        additional_config=own,
        **options,
    )
    assert drafter == "stock" or require(llm)[0]["runner"] == job["runner"]
    scheduling = llm.llm_engine.vllm_config.scheduler_config
    assert bool(scheduling.async_scheduling) == (job["runner"] == "v2")
    yield llm
    llm.llm_engine.engine_core.shutdown()


def params(job: dict[str, Any]) -> list[Any]:
    """Return parameters of every kind: temperatures, truncations, penalties, short texts."""
    import vllm

    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 12},
        {"temperature": 1.0, "presence_penalty": 0.5},
        {"temperature": 1.0, "max_tokens": 2},
        {"temperature": 0.7, "top_k": 5, "max_tokens": 2},
    ]
    return [
        vllm.SamplingParams(
            seed=seed,
            detokenize=False,
            ignore_eos=True,
            **{"max_tokens": MAX_TOKENS, **kinds[index % len(kinds)]},
        )
        for index, seed in enumerate(job["seeds"])
    ]


def texts(job: dict[str, Any], llm: Any, *, backwards: bool = False) -> dict[str, Any]:
    """Generate for all prompts; return tokens and vLLM's counts."""
    order = slice(None, None, -1 if backwards else 1)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    done = llm.generate(prompts[order], params(job)[order], use_tqdm=False)
    return {
        "tokens": [list(each.outputs[0].token_ids) for each in done[order]],
        "metrics": {
            each.name: each.value
            for each in llm.get_metrics()
            if each.name.startswith(("vllm:spec_decode_num", "vllm:num_preempt"))
            and hasattr(each, "value")
        },
    }


def stock(job: dict[str, Any]) -> Any:
    """vLLM without the plugin."""
    with engine(job, "stock") as llm:
        return texts(job, llm)


def plain(job: dict[str, Any]) -> Any:
    """Keyed noise without drafts."""
    with engine(job, None, enable_prefix_caching=False) as llm:
        return texts(job, llm)


def eagle3(job: dict[str, Any]) -> Any:
    """EAGLE-3 with a prefix cache, twice, the second time in reverse order."""
    with engine(job, "eagle3", enable_prefix_caching=True) as llm:
        return [texts(job, llm), texts(job, llm, backwards=True)]


def losing(job: dict[str, Any]) -> Any:
    """An EAGLE-3 drafter whose likeliest tokens are the target's least likely ones."""
    from prometheus_client import REGISTRY
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    with engine(job, "losing") as llm:
        turns = [texts(job, llm) for _ in range(3)]
        shown = [each for each in REGISTRY.collect() if each.name.startswith("longtail:")]
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    (stats := SchedulerStats()).longtail = {each.name: each.samples[0].value for each in shown}
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))  # to a front end
    found = MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats
    chosen = bool(getattr(scheduler, "dynamic_sd_lookup", None))
    return {"turns": turns, "shown": found.longtail, "chosen": chosen}


def ridge(job: dict[str, Any]) -> Any:
    """A ridge drafter, exported as EAGLE-1."""
    with engine(job, "ridge") as llm:
        return texts(job, llm)


def draft_model(job: dict[str, Any]) -> Any:
    """A draft model, which is the target itself."""
    with engine(job, "target") as llm:
        return texts(job, llm)


def mtp(job: dict[str, Any]) -> Any:
    """A model with an MTP head, random like all of it, and the same without drafts."""
    model = job | {"target": job["mtp"]}
    with engine(model, None, load_format="dummy") as llm:
        plain = texts(job, llm)["tokens"]
    with engine(model, "mtp", load_format="dummy") as llm:
        return texts(job, llm) | {"plain": plain}


def cramped(job: dict[str, Any]) -> Any:
    """So many requests at a time that some are preempted; 139 blocks are too few for vLLM 0.24."""
    blocks = {"num_gpu_blocks_override": 160, "block_size": 16}
    with engine(job, "eagle3", max_num_seqs=14, **blocks) as llm:
        return texts(job, llm)


def learned(job: dict[str, Any]) -> Any:
    """A drafter that vLLM learns from nothing: cramped, with a prefix cache, and new weights."""
    found: dict[str, Any] = {}
    options = {"num_gpu_blocks_override": 12, "block_size": 32}
    with engine(job, "learned", enable_prefix_caching=True, **options) as llm:
        found["turns"] = [texts(job, llm, backwards=bool(turn % 2)) for turn in range(job["turns"])]
        (found["status"],) = llm.collective_rpc("longtail_status")
        llm.collective_rpc("reload_weights", kwargs={"weights_path": job["target"]})
        llm.reset_prefix_cache()
        found["renewed"] = texts(job, llm)
        (found["saved"],) = llm.collective_rpc("longtail_save_drafter", args=(job["saved"],))
    return found


def updated(job: dict[str, Any]) -> Any:
    """Texts before and after weights change in place, two of each."""
    from longtail.vllm.plugin import _status

    found: dict[str, Any] = {"tokens": []}
    with engine(job, "learned", enable_prefix_caching=True) as llm:
        worker = llm.llm_engine.model_executor.driver_worker  # as trainers in its process reach it
        for turn in range(4):
            if turn == 2:
                change(worker)
            llm.reset_prefix_cache()
            found["texts"] = texts(job, llm)["tokens"]
            found["tokens"].append(_status(worker)["learned"]["tokens"])
    with engine(job, None, enable_prefix_caching=False) as llm:
        change(llm.llm_engine.model_executor.driver_worker)
        return found | {"plain": texts(job, llm)["tokens"]}


def change(worker: Any) -> None:
    """Change a part of the target in place that a CPU's engine has no packed copy of."""
    import torch

    with torch.no_grad():
        for name, each in worker.model_runner.get_model().named_parameters():
            if "norm" in name:
                each.mul_(1.25)


def ranks(job: dict[str, Any]) -> Any:
    """A learned drafter of two ranks, which hold halves of the target, and of its new weights."""
    with engine(job, "learned", tensor_parallel_size=2) as llm:
        found = {"turns": [texts(job, llm)["tokens"] for _ in range(3)]}
        found["status"] = llm.collective_rpc("longtail_status")
        llm.collective_rpc(change)
        llm.reset_prefix_cache()
        return found | {"changed": texts(job, llm), "after": llm.collective_rpc("longtail_status")}


def launched(job: dict[str, Any]) -> Any:
    """The same in two processes with engines of their own, as torchrun starts them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    words = [sys.executable, "-I", __file__, json.dumps(job | {"scenes": ["rank"]}), *sys.path[:2]]
    started = [
        subprocess.Popen(
            words,
            env={**os.environ, **address, "WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
        )
        for rank in "01"
    ]
    try:
        return [json.loads(each.communicate(timeout=600)[0])["rank"] for each in started]
    finally:
        for each in started:
            each.kill()


def rank(job: dict[str, Any]) -> Any:
    """One of them; the clock of the second is another one."""
    found: dict[str, Any] = {"depths": [], "turns": []}
    if os.environ["RANK"] == "1":
        ticks = itertools.accumulate(iter(random.Random(1).random, None))
        time.perf_counter = lambda: next(ticks)
    options = {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}
    with engine(job, "learned", **options) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def noting(*args: Any, **words: Any) -> Any:
            output = schedule(*args, **words)
            found["depths"].append(output.num_spec_tokens_to_schedule)
            return output

        scheduler.schedule = noting
        found["turns"] = [texts(job, llm)["tokens"] for _ in range(3)]
    return found


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *sys.argv[2:])
