"""The depth of drafts in vLLM follows a tuner, which learns from whole steps of one depth."""

from longtail.generator import Switch
from longtail.speculation.strategy import Strategy
from longtail.tuner.bandit import BanditTuner
from longtail.tuner.records import Batch, Outcome, Plan
from longtail.tuner.tuner import FixedTuner, OffTuner, Tuner
from longtail.vllm.depths import MAX_DEPTH, Depths, Taken


class Recording(Tuner):
    """Plans depths one after another, and keeps what it learns."""

    def __init__(self, *depths: int) -> None:
        self.depths, self.learned = list(depths), list[Outcome]()

    def plan(self, batch: Batch) -> Plan:
        depth = self.depths.pop(0)
        return Plan(strategy=Strategy(depth=depth, size=depth) if depth else None)

    def learn(self, outcome: Outcome) -> None:
        self.learned.append(outcome)


def step(
    running: int, drafted: int = 0, accepted: int = 0, prompt: int = 0, seconds: float = 0.5
) -> Taken:
    return Taken(
        num_running=running,
        num_tokens=running * (1 + drafted) + prompt,
        verified=[(drafted, accepted)] * running if drafted else [],
        seconds=seconds,
    )


def test_a_depth_is_kept_for_six_steps_while_as_many_run() -> None:
    chosen = Depths(Recording(2, 3, 4))
    found = []
    for running in (4,) * 6 + (5, 6, 3):  # 4 to 7 have as many binary digits
        chosen.choose(running)
        found.append(chosen.depth)
    assert found == [2] * 6 + [3] * 2 + [4]


def test_a_step_teaches_only_if_it_verified_at_the_depth_at_which_it_drafts() -> None:
    tuner = Recording(2, 3)
    chosen = Depths(tuner)
    for _ in range(3):
        chosen.choose(2)
        chosen.learn(step(2, drafted=2, accepted=1, prompt=6))
    chosen.choose(1)  # the drafts that this step verifies are those of depth 2
    chosen.learn(step(1, drafted=2))
    assert len(tuner.learned) == 2
    (first, _), batch = tuner.learned, tuner.learned[0].batch
    assert (first.num_nodes, first.num_accepted, first.num_emitted, first.seconds) == (4, 2, 4, 0.5)
    assert (batch.num_sampled, batch.num_tokens) == (2, 8)  # six of a prompt


def test_a_change_between_plain_decoding_and_drafts_is_told_with_its_reason() -> None:
    chosen = Depths(FixedTuner(Strategy(depth=3)))
    assert chosen.choose(2) == Switch(drafts=True, reason="2 running, measured in vLLM's steps")
    assert chosen.choose(2) is None


def test_plain_decoding_and_the_deepest_table_are_bounds() -> None:
    off = Depths(OffTuner())
    assert off.choose(3) is None
    assert off.depth == 0
    deep = Depths(FixedTuner(Strategy(depth=20)))
    deep.choose(1)
    assert deep.depth == MAX_DEPTH


def test_the_bandit_finds_plain_decoding_where_drafts_are_refused_and_depth_where_they_stand() -> (
    None
):
    for accepted, best in ((0.0, 0), (1.0, 4)):
        chosen, found, before = Depths(BanditTuner(epsilon=0.0)), [], 0
        for _ in range(600):
            chosen.choose(30)
            seconds = 1.0 + 0.1 * before  # a draft costs a tenth of a step
            chosen.learn(step(30, before, round(before * accepted), seconds=seconds))
            before = chosen.depth
            found.append(before)
        assert set(found[-50:]) == {best}
