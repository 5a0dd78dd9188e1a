"""The scheduler drafts where that pays by its own steps' seconds, and decodes plainly elsewhere."""

from types import SimpleNamespace
from typing import Any

import pytest

from longtail.vllm import pace

DEPTH = 4


class Scheduler:
    """vLLM's, as far as the choice needs it; steps take what a machine of the test says."""

    max_num_running_reqs = 64
    num_spec_tokens = DEPTH

    def __init__(self, running: int, stands: float, ahead: bool) -> None:
        scheduling = SimpleNamespace(async_scheduling=ahead)
        self.vllm_config = SimpleNamespace(scheduler_config=scheduling)
        self.running, self.stands = [f"r{i}" for i in range(running)], stands
        self.dynamic_sd_lookup = [DEPTH] * 65
        self.depth = 0

    def schedule(self, throttle_prefills: bool = False) -> Any:
        drafted, self.depth = self.depth, self.dynamic_sd_lookup[len(self.running)]
        given = {name: [0] * drafted for name in self.running} if drafted else {}
        return SimpleNamespace(
            num_scheduled_tokens={name: 1 + drafted for name in self.running},
            total_num_scheduled_tokens=len(self.running) * (1 + drafted),
            scheduled_spec_decode_tokens=given,
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict:
        return {}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("stands", "slope", "depths"), [(0.9, 0.05, {DEPTH}), (0.1, 0.4, {0})])
def test_depth_follows_what_steps_took_and_yielded(
    monkeypatch: pytest.MonkeyPatch, stands: float, slope: float, depths: set[int], ahead: bool
) -> None:
    clock = [0.0]
    monkeypatch.setattr(pace.time, "perf_counter", lambda: clock[0])
    scheduler: Any = Scheduler(8, stands, ahead)
    pace.pace(scheduler)
    found, outputs = [], []
    for _ in range(1200):
        outputs.append(scheduler.schedule())
        if ahead and len(outputs) == 1:
            continue
        output = outputs.pop(0)
        drafted = output.total_num_scheduled_tokens // 8 - 1
        clock[0] += 1.0 + slope * drafted
        sampled = [[0] * (1 + round(drafted * stands)) for _ in scheduler.running]
        places = {name: place for place, name in enumerate(scheduler.running)}
        scheduler.update_from_output(
            output, SimpleNamespace(req_id_to_index=places, sampled_token_ids=sampled)
        )
        found.append(scheduler.depth)
    share = sum(each in depths for each in found[-600:]) / 600
    assert share > 0.9
