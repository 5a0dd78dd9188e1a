"""The laws of `support.contract` on vLLM; run by path in an environment with its wheel.

    python -I contract_laws.py v1|v2 SRC TESTS

V2 schedules ahead, as on a GPU; its noise is vLLM's, and its texts are not longtail's engine's.
One JSON object on standard output: the error of each law, or an empty text.
"""

import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def main(runner: str, *packages: str) -> None:
    """Check all laws."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:0] = packages
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if runner == "v2":
        from vllm_wheel import runner_v2

        runner_v2.choose()
    import torch

    torch.set_num_threads(1)
    from support import contract

    found = {}
    if runner == "v2":  # the interpreter cannot run vLLM's n-gram search
        contract.DRAFTERS = contract.DRAFTERS[:2]
    own = contract.law_1_texts_are_those_of_longtails_engine
    for law in [law for law in contract.LAWS if runner == "v1" or law is not own]:
        print(f"law {law.__name__}", file=sys.stderr, flush=True)
        try:
            law(opening)
            found[law.__name__] = ""
        except Exception:  # noqa: BLE001  (the other laws are checked)
            found[law.__name__] = traceback.format_exc()
    print(json.dumps(found), file=replies, flush=True)


@contextmanager
def opening(drafter: str) -> Iterator[Any]:
    """Open vLLM with a drafter, and check in the end that no block of KV is lost (law 5)."""
    from longtail.assembly.drafters import drafter_names
    from longtail.assembly.vllm import open_vllm
    from support import contract

    target = contract.toy_target()
    names = drafter_names(drafter, target.name, learns=True)
    small = {"block_size": 32}  # beginnings of texts are found in the cache, too
    plan = contract.plan(drafter, vllm=small)
    opened = open_vllm(plan, contract.LIMITS, names, target.tokenizer, target.model)
    generator: Any = opened[0]
    scheduler = generator._engine.vllm_config.scheduler_config
    assert bool(scheduler.async_scheduling) == (os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1")
    pool = generator._scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    try:
        yield opened
        assert generator.num_unfinished == 0
        assert pool.get_num_free_blocks() == free, "blocks of KV are lost"
    finally:
        generator.close()
        gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
