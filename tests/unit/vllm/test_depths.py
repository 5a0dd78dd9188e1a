"""The scheduler drafts where that pays by its own steps' seconds, and decodes plainly elsewhere."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from longtail.speculation.strategy import Strategy
from longtail.tuner.depth import DepthTuner
from longtail.tuner.messages import Batch, Outcome, Plan
from longtail.tuner.tuner import FixedTuner, OffTuner, Tuner
from longtail.vllm import depths, patching
from longtail.vllm.depths import Depths
from longtail.vllm.gain_log import Gains

DEPTH = 4


class Scheduler:
    """vLLM's, as far as the choice needs it."""

    max_num_running_reqs = 64
    num_spec_tokens = DEPTH

    def __init__(self, running: int, ahead: bool = False) -> None:
        scheduling = SimpleNamespace(async_scheduling=ahead)
        self.vllm_config = SimpleNamespace(scheduler_config=scheduling, additional_config={})
        self.running = [f"r{i}" for i in range(running)]
        self.dynamic_sd_lookup: list[int] | None = None  # as in V1
        self.depth = self.prompt = 0

    def schedule(self, throttle_prefills: bool = False) -> Any:
        drafted, self.depth = self.depth, self.dynamic_sd_lookup[len(self.running)]
        given = {name: [0] * drafted for name in self.running} if drafted else {}
        return SimpleNamespace(
            num_scheduled_tokens={name: 1 + drafted for name in self.running},
            total_num_scheduled_tokens=len(self.running) * (1 + drafted) + self.prompt,
            scheduled_spec_decode_tokens=given,
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict:
        return {0: SimpleNamespace(scheduler_stats=SimpleNamespace())}

    def reset_prefix_cache(self) -> bool:
        return True

    def set_pause_state(self, state: str) -> None:
        self.pause_state = state


def end(scheduler: Any, output: Any, stands: float = 0.5) -> Any:
    """End a step, in which a share of the drafts stands; return vLLM's statistics."""
    drafted = max(map(len, output.scheduled_spec_decode_tokens.values()), default=0)
    names = output.num_scheduled_tokens
    sampled = [[0] * (1 + round(drafted * stands)) for _ in names]
    places = {name: place for place, name in enumerate(names)}
    given = SimpleNamespace(req_id_to_index=places, sampled_token_ids=sampled)
    return scheduler.update_from_output(output, given)[0].scheduler_stats


class Recording(Tuner):
    """Plans depths one after another, and keeps what it learns."""

    def __init__(self, *planned: int) -> None:
        self.planned, self.learned = list(planned), list[Outcome]()

    def plan(self, batch: Batch) -> Plan:
        depth = self.planned.pop(0)
        return Plan(strategy=Strategy(depth=depth, size=depth) if depth else None)

    def learn(self, outcome: Outcome) -> None:
        self.learned.append(outcome)


def test_a_depth_is_kept_for_six_steps_while_as_many_run():
    scheduler: Any = Scheduler(0)
    Depths(scheduler, Recording(2, 3, 4))
    found = []
    for running in (4,) * 6 + (5, 6, 3):  # 4 to 7 have as many binary digits
        scheduler.running = [f"r{i}" for i in range(running)]
        scheduler.schedule()
        found.append(scheduler.depth)
    assert found == [2] * 6 + [3] * 2 + [4]


def test_a_step_teaches_only_if_it_verified_at_the_depth_at_which_it_drafts():
    scheduler: Any = Scheduler(2)
    tuner = Recording(2, 3)
    Depths(scheduler, tuner)
    scheduler.prompt = 6
    for _ in range(3):
        end(scheduler, scheduler.schedule())
    scheduler.running.pop()
    end(scheduler, scheduler.schedule())  # the drafts that this step verifies are those of depth 2
    assert len(tuner.learned) == 2
    (first, _), batch = tuner.learned, tuner.learned[0].batch
    assert (first.num_nodes, first.num_accepted, first.num_emitted) == (4, 2, 4)
    assert (batch.num_sampled, batch.num_tokens) == (2, 8)  # six of a prompt


@pytest.mark.parametrize(
    ("tuner", "depth"), [(OffTuner, 0), (lambda: FixedTuner(Strategy(depth=20)), DEPTH)]
)
def test_plain_decoding_and_the_deepest_table_are_bounds(tuner, depth):
    scheduler: Any = Scheduler(3)
    Depths(scheduler, tuner())
    output = scheduler.schedule()
    assert scheduler.dynamic_sd_lookup == [depth] * 65
    assert output.num_spec_tokens_to_schedule == depth


def test_the_first_step_after_a_pause_says_so() -> None:
    scheduler: Any = Scheduler(2)
    Depths(scheduler, Recording(2))
    for paused in (False, True):
        if paused:
            scheduler.set_pause_state("UNPAUSED")
        assert [scheduler.schedule().longtail_has_paused for _ in range(2)] == [paused, False]
    assert scheduler.pause_state == "UNPAUSED"


@pytest.mark.parametrize("chooses", [True, False])
def test_what_drafts_gain_is_logged_and_counted(monkeypatch, caplog, chooses):
    """The first step verifies none; each later one yields 2 tokens a request in 15 s, not 10."""
    clock = [0.0]
    monkeypatch.setattr(depths.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(Recording, "plain_s", lambda self, running: 10.0)
    caplog.set_level(logging.INFO, "vllm.plugins.longtail")
    scheduler: Any = Scheduler(3)
    scheduler.dynamic_sd_lookup = [2] * 65  # vLLM's own, which stays where nothing is chosen
    Depths(scheduler, Recording(2) if chooses else None)
    for _ in range(4):
        output = scheduler.schedule()
        clock[0] += 15.0 if output.scheduled_spec_decode_tokens else 13.0
        stats = end(scheduler, output)
    scheduler.reset_prefix_cache()
    saved = [f"{each} s saved against plain steps" for each in ("7.0", "5.0")]
    first, last = saved if chooses else 2 * ["no plain step was seen to compare with"]
    length = "accept length 2.00 (by depth: 1.00, 0.00)"
    assert caplog.messages == [
        f"longtail: 15 tokens in 43 s, {length}, 67 % of steps drafted, {first}",
        f"longtail: 6 tokens in 15 s, {length}, 100 % of steps drafted, {last}",
    ]
    shown = {"steps_drafted": 3, "steps_plain": 1, "step_seconds": 58.0, "draft_depth": 2}
    assert stats.longtail == shown | {"seconds_saved": 12.0 * chooses}


def test_drafts_that_stand_no_more_are_warned_of_once(caplog):
    gains = Gains()
    for accepted in (1, 0, 0, 0, 1, 0):
        for _ in range(34):
            gains.add([(3, accepted)], 1, 0.1, None)
            gains.log()  # too little to tell
    assert len(caplog.messages) == 2
    said = "longtail: 0 of 102 drafted tokens were accepted, 33 % before: "
    assert all(each.startswith(said) and "load" in each for each in caplog.messages)


@pytest.mark.parametrize(
    ("version", "method", "parallel", "own", "chooses"),
    [
        ("0.24.0", "mtp", {}, {}, True),
        ("0.24.0+cpu", "mtp", {}, {}, False),
        ("0.23.0", "eagle3", {}, {}, False),  # one depth
        ("0.31.0+v2", "eagle3", {}, {}, False),  # its V2 drafts all, and verifies less
        ("0.32.0+v2", "eagle3", {}, {}, True),
        ("0.32.0", "medusa", {}, {}, False),
        ("0.31.0+hybrid", "mtp", {}, {}, False),  # a step without drafts begins with an old state
        ("0.32.0+hybrid", "mtp", {}, {}, True),
        ("0.32.0", "eagle3", {"data_parallel_size": 2}, {}, False),
        ("0.32.0", "eagle3", {"pipeline_parallel_size": 2}, {}, False),
        ("0.23.0", "ngram", {}, {"drafter": "learned"}, True),
    ],
)
def test_drafters_that_can_draft_more_and_less_do(
    monkeypatch, version, method, parallel, own, chooses
):
    monkeypatch.setattr(patching, "vllm_version", lambda: version)
    device = "cpu" if version.endswith("cpu") else "cuda"
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(is_hybrid=version.endswith("hybrid")),
        additional_config={"longtail": own},
        speculative_config=SimpleNamespace(method=method),
        parallel_config=SimpleNamespace(
            **{"data_parallel_size": 1, "pipeline_parallel_size": 1} | parallel
        ),
        use_v2_model_runner=version.endswith("v2"),
    )
    assert patching.chooses_depth(config) is chooses


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("stands", "slope", "best"), [(0.9, 0.05, DEPTH), (0.1, 0.4, 0)])
def test_depth_follows_what_steps_took_and_yielded(monkeypatch, stands, slope, best, ahead):
    clock = [0.0]
    monkeypatch.setattr(depths.time, "perf_counter", lambda: clock[0])
    scheduler: Any = Scheduler(8, ahead)
    Depths(scheduler, DepthTuner())
    found, outputs = [], [scheduler.schedule()] if ahead else []
    for _ in range(1200):
        outputs.append(scheduler.schedule())
        output = outputs.pop(0)
        clock[0] += 1.0 + slope * (output.total_num_scheduled_tokens // 8 - 1)
        end(scheduler, output, stands)
        found.append(scheduler.depth)
    assert sum(each == best for each in found[-600:]) / 600 > 0.9
