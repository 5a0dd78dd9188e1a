"""What idle workers make of a rollout, in simulated time: texts to them, drafters from them."""

from collections import Counter

import pytest
import torch

from longtail.cluster.group import WorkerGroup
from longtail.cluster.spot import OFFER_S
from longtail.drafter.training.spot import SpotEnd
from support.crews import ScriptedCrew, batch, begun, requests
from support.fake_worker import QUALITY, FakeWorker, Fault, Teaching, text

TAIL = requests(100, 10, 50)


def step(fleet: WorkerGroup, number: int, asked=TAIL) -> list[tuple[str, int, str]]:
    """One whole step; what was decided about the drafter."""
    rolled = fleet.rollout(number, asked)
    assert [each.tokens for each in rolled.completions] == [text(each) for each in asked]
    fleet.learn([batch(number)])
    fleet.publish()
    fleet.offer_drafter()
    return [(each.what, each.version, each.reason) for each in fleet.decisions]


def lengths_heard(worker: FakeWorker) -> dict[str, list[int]]:
    """Of each text, what its versions were."""
    found: dict[str, list[int]] = {}
    for each in worker.heard:
        found.setdefault(each.request_id, []).append(len(each.tokens) - each.prompt_len)
    return found


def test_spot_workers_hear_each_text_once_and_the_growth_of_those_being_written():
    crew = ScriptedCrew(3)
    begun(crew).rollout(1, TAIL)
    heard = lengths_heard(crew.workers[1])
    assert heard["p1@0#0"] == [10], "finished before it began to train"
    for name, whole in (("p0@0#0", 100), ("p2@0#0", 50)):
        assert heard[name] == sorted(set(heard[name])), "longer each time"
        assert len(heard[name]) >= whole / 10 - 3
    assert heard["p2@0#0"][-1] == 50
    finished = Counter(each.request_id for each in crew.workers[1].heard if each.is_finished)
    assert finished == {"p1@0#0": 1, "p2@0#0": 1}


def test_a_replaced_worker_hears_everything_from_the_beginning():
    faults = [Fault(worker=1, task="spot", after_s=2.0)]
    crew = ScriptedCrew(3, faults=faults)
    begun(crew).rollout(1, TAIL)
    assert crew.births == [0, 1, 0]
    heard = lengths_heard(crew.workers[1])
    assert heard["p1@0#0"] == [10]
    assert heard.keys() == {"p0@0#0", "p1@0#0", "p2@0#0"}


def test_a_newcomer_does_not_rest_because_its_predecessor_did():
    # Worker 1 finds that training does not pay, takes over a shard, and is lost with it.
    faults = [
        Fault(worker=0, task="generate", after_s=5.0),
        Fault(worker=1, task="generate", nth=1, after_s=6.0),
    ]
    teaching = Teaching(ends_s=1.0, reason=SpotEnd.NO_GAIN)
    crew = ScriptedCrew(2, faults=faults, teachings=lambda worker, nth: teaching)
    begun(crew).rollout(1, requests(200, 10))
    assert crew.births == [1, 1]
    assert [worker for _, worker in crew.begins("spot")] == [1, 0, 1]


def test_texts_whose_receipt_is_not_known_are_sent_again():
    crew = ScriptedCrew(2, late={(1, "feed"): 1})
    begun(crew).rollout(1, requests(900, 10))
    assert lengths_heard(crew.workers[1])["p1@0#0"] == [10]


def test_who_wrote_to_the_end_hears_the_long_texts_of_that_step_in_the_next():
    crew = ScriptedCrew(2)
    fleet = begun(crew)
    fleet.rollout(1, requests(10, 100))
    assert not crew.workers[1].heard
    fleet.rollout(2, requests(100, 10, first=5))
    of_step_1 = [each.request_id for each in crew.workers[1].heard if each.step == 1]
    assert of_step_1 == ["p1@0#0"], "the short one went when the step began"


def test_texts_of_a_resumed_run_are_learned_from(tmp_path):
    crew = ScriptedCrew(2)
    fleet = begun(crew)
    step(fleet, 1)
    state = fleet.drafter_state()
    assert state is not None
    again = ScriptedCrew(2)
    resumed = begun(again)
    resumed.restore_drafter(state)
    assert resumed.published is not None
    assert resumed.published.version == state.numbers["version"]
    assert all(each.served.version == state.numbers["version"] for each in again.workers)
    resumed.rollout(2, requests(50, 10, first=5))
    assert {each.step for each in again.workers[1].heard} == {1, 2}
    step(resumed, 3)
    assert resumed.published.version > state.numbers["version"]


def test_drafters_that_measure_better_reach_those_who_generate_in_mid_rollout():
    crew = ScriptedCrew(2)
    fleet = begun(crew)
    fleet.rollout(1, requests(200, 10))
    offers = [worker for worker, name in crew.told if name == "offer"]
    assert set(offers) == {0}
    assert len(offers) == pytest.approx(190 / 10 / OFFER_S, abs=2)
    decisions = [(each.what, each.version) for each in fleet.decisions]
    assert ("published", 1) in decisions
    assert fleet.published is not None
    assert fleet.published is crew.workers[0].served
    assert fleet.published.version > 1
    names = [mark.name for mark in fleet.timeline().marks]
    assert names[0] == "drafter v1 offered"


def test_the_same_candidate_is_not_offered_again_and_again():
    teaching = Teaching(measures_s=2.0, gain=0.05, ends_s=3.0, reason=SpotEnd.NO_GAIN)
    crew = ScriptedCrew(
        3, teachings=lambda worker, nth: teaching if worker == 1 else Teaching(gain=0.0)
    )
    decisions = step(begun(crew), 1, requests(400, 10, 10))
    assert Counter(what for what, _, _ in decisions) == {
        "trained": 1,
        "offered": 1,
        "published": 1,
        "kept": decisions_kept(decisions),
    }


def decisions_kept(decisions: list[tuple[str, int, str]]) -> int:
    """All of them of replicas that were no better."""
    kept = [reason for what, _, reason in decisions if what == "kept"]
    assert set(kept) <= {"no better on held-out recent texts"}
    return len(kept)


def test_a_drafter_whose_offer_never_arrived_is_offered_again_at_the_end():
    # The only candidate there is: measured once.
    teaching = Teaching(measures_s=3.0, ends_s=5.0, reason=SpotEnd.NO_GAIN)
    crew = ScriptedCrew(2, late={(0, "offer"): 1}, teachings=lambda worker, nth: teaching)
    decisions = step(begun(crew), 1, requests(61, 10))
    assert [(what, version) for what, version, _ in decisions if what != "trained"] == [
        ("offered", 1),
        ("offered", 2),
        ("published", 2),
    ]


def test_who_was_idle_catches_up_before_it_writes_again():
    crew = ScriptedCrew(2)
    fleet = begun(crew)
    fleet.rollout(1, requests(200, 10))
    assert fleet.published is not None
    assert crew.workers[1].served.version == 0
    version = fleet.published.version
    crew.told.clear()
    fleet.rollout(2, requests(5, 5, first=5))
    assert [each.served.version for each in crew.workers] == [version, version]
    assert [worker for worker, name in crew.told if name == "offer"] == [1]


def test_a_newcomer_catches_up_before_it_writes():
    crew = ScriptedCrew(2)
    fleet = begun(crew)
    step(fleet, 1)
    fleet.rollout(2, requests(5, 5, first=5))
    assert fleet.published is not None
    assert crew.workers[1].served.version == fleet.published.version > 0
    crew.kill(1)
    fleet.publish()
    assert crew.births == [0, 1]
    assert crew.workers[1].served.version == 0
    fleet.rollout(3, requests(5, 5, first=9))
    assert {each.served.version for each in crew.workers} == {fleet.published.version}


def test_replicas_are_merged_at_the_end_and_everybody_serves_them():
    # Nobody generates long enough for an offer in mid-rollout.
    crew = ScriptedCrew(3, teachings=lambda worker, nth: Teaching(gain=0.05 * worker))
    fleet = begun(crew)
    decisions = step(fleet, 1, requests(35, 10, 12))
    assert [what for what, _, _ in decisions] == ["trained", "trained", "offered", "published"]
    assert {each.served.version for each in crew.workers} == {1}
    # Both have learned as much.
    assert crew.workers[0].served.tensors["w"].item() == pytest.approx(QUALITY * 1.075)


def test_a_drafter_that_is_not_finite_any_more_is_discarded_and_the_run_goes_on():
    bad = Teaching(ends_s=3.0, reason=SpotEnd.NOT_FINITE)
    crew = ScriptedCrew(3, teachings=lambda worker, nth: bad if worker == 1 else Teaching())
    fleet = begun(crew)
    decisions = step(fleet, 1)
    assert ("discarded", 0, "it is not finite") in decisions
    assert any("worker 1: its drafter is discarded" in said for said in crew.said)
    assert [worker for _, worker in crew.begins("spot")].count(1) == 1, "it rests"
    assert fleet.published is not None
    assert fleet.published.tensors["w"].isfinite().all()


def test_weights_that_are_not_finite_are_never_offered():
    crew = ScriptedCrew(2, teachings=lambda worker, nth: Teaching(weight=float("nan")))
    fleet = begun(crew)
    decisions = step(fleet, 1)
    assert {what for what, _, _ in decisions} == {"kept"}
    assert fleet.published is not None
    assert fleet.published.version == 0


def test_training_that_fails_is_noted_and_ends_nothing():
    failing = Teaching(ends_s=1.0, error=RuntimeError("out of memory"))
    crew = ScriptedCrew(2, teachings=lambda worker, nth: failing)
    decisions = step(begun(crew), 1)
    assert decisions == [("discarded", 0, "RuntimeError: out of memory")]
    assert "out of memory" in crew.said[0]
    assert crew.births == [0, 0]


@pytest.mark.parametrize("damage", ["bits", "nan"])
def test_an_offer_that_arrives_damaged_changes_nothing(damage):
    def damaged(offer):
        spoilt = torch.tensor([float("nan") if damage == "nan" else 9.0])
        weights = type(offer.weights)(version=offer.weights.version, tensors={"w": spoilt})
        digest = weights.digest if damage == "nan" else offer.digest
        return type(offer)(weights=weights, digest=digest, texts=offer.texts)

    crew = ScriptedCrew(2, damages=damaged)
    fleet = begun(crew)
    refused = [each for each in step(fleet, 1) if each[0] == "refused"]
    reason = "they are not finite" if damage == "nan" else "they are not what was sent"
    assert {each[2] for each in refused} == {reason}
    assert fleet.published is not None
    assert fleet.published.version == 0
    assert all(each.served.version == 0 for each in crew.workers)
    offered = [version for what, version, _ in step(fleet, 2) if what == "offered"]
    assert min(offered) > max(version for _, version, _ in refused)


def test_whoever_refuses_serves_what_it_had_and_the_others_go_on():
    crew = ScriptedCrew(3, refuses=lambda worker, version: worker == 2)
    fleet = begun(crew)
    decisions = step(fleet, 1, requests(35, 10, 12))
    assert ("refused", 1, "they do worse here") in decisions
    assert ("published", 1, "") in decisions
    assert [each.served.version for each in crew.workers] == [1, 1, 0]


def test_serial_training_is_done_by_one_while_all_others_wait():
    crew = ScriptedCrew(2)
    fleet = begun(crew, "serial")
    before = crew.clock.now
    decisions = step(fleet, 1, requests(400, 10))
    ((when, worker),) = crew.begins("spot")
    assert worker == 0
    assert when > before + 40.0
    assert lengths_heard(crew.workers[0]) == {"p0@0#0": [400], "p1@0#0": [10]}
    assert [what for what, _, _ in decisions] == ["trained", "offered", "published"]
    assert {each.served.version for each in crew.workers} == {1}
    # A tenth of the rollout's time: two measurements in four seconds.
    assert crew.workers[1].served.tensors["w"].item() == pytest.approx(QUALITY * 1.05**2)
    fleet.offer_drafter()
    assert len(crew.begins("spot")) == 1, "a rollout is learned once"


def test_a_worker_lost_in_serial_training_costs_the_lesson_only():
    faults = [Fault(worker=0, task="spot", after_s=1.0)]
    crew = ScriptedCrew(2, faults=faults)
    fleet = begun(crew, "serial")
    assert step(fleet, 1, requests(400, 10)) == []
    assert [what for what, _, _ in step(fleet, 2, requests(400, 10))] != []
    assert [each.policy for each in crew.workers] == [(1, 2), (1, 2)]
