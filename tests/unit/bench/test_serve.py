"""`longtail bench serve`: its ratios, its clients and its soak test."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from longtail.bench.common.timing import Spread
from longtail.bench.serve import card
from longtail.bench.serve.client import Answer, load, request
from longtail.bench.serve.measure import Clients, Point, Turn
from longtail.bench.serve.options import ServeBenchOptions
from longtail.bench.serve.peer import Rival, serving
from longtail.bench.serve.soak import SoakResult, soak
from longtail.drafter.history import HistoryDrafter
from longtail.engine.engine import RolloutEngine
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import ConfigError
from longtail.serve.options import Limits
from longtail.serve.server import running
from longtail.speculation.strategy import Strategy
from longtail.types import Request
from support.serving import NAME, FailingEngine, make_engine, make_model_server

LIMITS = Limits(max_running=4, max_queue=4, max_len=96, max_tokens=64, max_choices=4)


def turn(total_s: float, first_s: float = 0.5, text: str = "a") -> Turn:
    """Two calls of 10 tokens each, one after the other."""
    answer = Answer(
        status=200, text=text, num_tokens=10, first_s=first_s, total_s=total_s, is_whole=True
    )
    return Turn(seconds=2 * total_s, answers=(answer, answer))


def point(clients: int, on_text: str = "a") -> Point:
    return Point(
        model="tiny",
        temperature=1.0,
        clients=clients,
        off=(turn(8.0, 0.5), turn(4.0, 0.5), turn(6.0, 0.5)),
        on=(turn(2.0, 0.25), turn(2.0, 0.5), turn(2.0, 1.0, on_text)),
    )


def call(seed: int = 1, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "1+1=", "seed": seed, "max_tokens": 8, **more}


def test_ratios_are_taken_within_each_turn() -> None:
    found = card.as_json(ServeBenchOptions(clients=(1, 32)), [point(1), point(32, "b")], {})
    ratio = {"median": 3.0, "low": 2.0, "high": 4.0}
    assert found["latency_speedup"]["tiny t=1"] == pytest.approx(ratio)
    assert found["throughput_ratio_32"]["tiny t=1"] == pytest.approx(ratio)
    assert found["first_token_ratio"] == {"tiny t=1": {"median": 1.0, "low": 0.5, "high": 2.0}}
    assert found["differing_share"] == 1 / 3
    assert found["points"][0]["tokens_per_s"] == {"off": 20 / 12, "on": 5.0}
    assert found["points"][0]["token_ms"] == pytest.approx({"off": 600.0, "on": 200.0})


def test_a_comparison_that_cannot_run_is_null_with_the_reason() -> None:
    rivals = {
        "tiny": Rival(ratio=None, reason="not here"),
        "100m": Rival(ratio=Spread(median=2.0, low=1.0, high=3.0), reason=""),
    }
    found = card.as_json(ServeBenchOptions(), [point(1)], rivals)
    assert found["peer_ratio"] == {"tiny": None, "100m": {"median": 2.0, "low": 1.0, "high": 3.0}}
    assert found["peer_absent"] == {"tiny": "not here"}
    json.dumps(found)


def test_a_server_that_does_not_start_is_reported_with_its_last_output(tmp_path: Any) -> None:
    with (
        pytest.raises(ConfigError, match="transformers serve does not start: "),
        serving("sh", tmp_path, "float32"),
    ):
        pytest.fail("it cannot have started")


def test_the_card_has_a_line_for_each_point_in_both_tables() -> None:
    for table in card.tables(ServeBenchOptions(), [1], [point(1), point(8)]):
        assert [row[1] for row in table.cells()] == ["1", "8"]


@pytest.mark.slow
def test_a_client_reads_whole_answers_and_streams_alike() -> None:
    streamed = call(stream=True, stream_options={"include_usage": True})
    with running(make_model_server(make_engine(limits=LIMITS), LIMITS)) as port:
        found = asyncio.run(load(port, 2, [call(), streamed, call(2), call()]))
        answers = [Answer(**each) for each in found["answers"]]
        with Clients([]) as clients:
            far = clients.turn(port, 2, [call(), streamed])
            with pytest.raises(ConfigError, match="a server answered 404"):
                clients.turn(port, 1, [call(model="another")])
        left = asyncio.run(request(port, json.dumps(call()).encode(), leave_after=1))
    assert all(each.status == 200 and each.is_whole for each in answers)
    assert answers[0].text == answers[1].text == answers[3].text == far.answers[1].text
    assert answers[0].text != answers[2].text
    assert {each.num_tokens for each in answers} == {8}
    assert answers[1].first_s <= answers[1].total_s
    assert (left.status, left.is_whole) == (0, False)


@pytest.mark.slow
def test_a_soak_of_a_sound_server_is_clean() -> None:
    speculation = Speculation.fixed(HistoryDrafter(), Strategy(depth=4, size=4))
    served = make_model_server(make_engine(limits=LIMITS, speculation=speculation), LIMITS)
    found = soak(served, NAME, 120, clients=24, max_tokens=4)
    assert found.faults == {}
    assert found.is_clean
    assert found.num_whole + found.num_left + found.num_refused == 120
    assert min(found.num_whole, found.num_left, found.num_refused) > 10
    assert found.num_asked_again > 0  # more arrived than the queue holds
    promises = found.promises
    assert (
        promises.pop("memory flat over the last half") is None
    )  # too few requests for a judgement
    assert all(promises.values())
    assert json.loads(json.dumps(found.numbers()))["promises"]["no 5xx but 503"] is True


def test_a_soak_judges_memory_and_statuses() -> None:
    sound = SoakResult(
        num_requests=1000,
        seconds=1.0,
        num_whole=600,
        num_left=200,
        num_refused=200,
        num_asked_again=5,
        statuses={200: 640, 400: 200, 429: 4, 503: 1},
        faults={},
        is_kv_free=True,
        rss_mb=(200.0, 300.0, 400.0, 404.0),
    )
    assert sound.is_clean
    assert set(sound.promises.values()) == {True}
    for change, promise in (
        ({"rss_mb": (200.0, 300.0, 400.0, 405.0)}, "memory flat over the last half"),
        ({"statuses": {500: 1}}, "no 5xx but 503"),
        ({"is_kv_free": False}, "all KV free at the end"),
        ({"num_whole": 599}, "all answered as they should be"),
    ):
        broken = replace(sound, **change)
        assert not broken.is_clean
        assert [name for name, held in broken.promises.items() if not held] == [promise]


class FickleEngine(RolloutEngine):
    """An engine that writes another text every time."""

    num_requests = 0

    def submit(self, request: Request) -> None:
        self.num_requests += 1
        super().submit(replace(request, noise_key=self.num_requests))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (FickleEngine, "a seed was answered with another text"),
        (FailingEngine, "a good request was answered 503"),
    ],
)
def test_a_soak_detects_faults(kind: type[RolloutEngine], fault: str) -> None:
    served = make_model_server(make_engine(kind, LIMITS), LIMITS)
    found = soak(served, NAME, 20, clients=4, max_tokens=4)
    assert found.faults[fault] > 0
    assert not found.is_clean
