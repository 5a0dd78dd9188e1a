"""The depth of the learned drafter's chains, chosen in vLLM's scheduler from its own steps.

vLLM has a table of depths by the number of running requests. The scheduler knows what each step
took and yielded, in a server as in a loop, so the tuner runs there.
"""

import time
from functools import wraps
from typing import Any

from longtail.tuner.depth import DepthTuner
from longtail.vllm.depths import Depths, Taken
from longtail.vllm.guards import check


def pace(scheduler: Any) -> None:
    """Choose the depth before each step of a scheduler, and learn from it afterwards."""
    schedule = check(scheduler, "schedule", "", then="throttle_prefills")
    update = check(scheduler, "update_from_output", "scheduler_output model_runner_output")
    ahead = bool(scheduler.vllm_config.scheduler_config.async_scheduling)
    depths = Depths(DepthTuner(), scheduler.num_spec_tokens, ahead=ahead)
    began: dict[int, float] = {}
    ended = 0.0

    @wraps(schedule)
    def paced(*args: Any, **options: Any) -> Any:
        now = time.perf_counter()
        depths.choose(min(len(scheduler.running), scheduler.max_num_running_reqs))
        table = scheduler.dynamic_sd_lookup
        table[:] = [depths.depth] * len(table)
        output = schedule(*args, **options)
        began[id(output)] = now
        return output

    @wraps(update)
    def learned(scheduler_output: Any, model_runner_output: Any) -> Any:
        nonlocal ended
        now = time.perf_counter()
        # A step that was scheduled ahead begins when the one before has ended.
        start = max(began.pop(id(scheduler_output), now), ended)
        ended = now
        depths.learn(_taken(scheduler_output, model_runner_output, now - start))
        return update(scheduler_output, model_runner_output)

    scheduler.schedule, scheduler.update_from_output = paced, learned


def _taken(scheduler_output: Any, model_runner_output: Any, seconds: float) -> Taken:
    """Return what a step took and yielded."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    places, sampled = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
    verified = [
        (len(given), max(len(sampled[places[name]]) - 1, 0))
        for name, given in drafts.items()
        if given and name in places
    ]
    return Taken(
        num_running=len(scheduler_output.num_scheduled_tokens),
        num_tokens=scheduler_output.total_num_scheduled_tokens,
        verified=verified,
        seconds=seconds,
    )
