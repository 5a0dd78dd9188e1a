"""`longtail bench engine`: the same work for every contestant, its ratios and its engine."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from end_to_end.workshop import Workshop, build, say, write_lines
from longtail.bench import engine
from longtail.bench.common.peers import ENGINE_WORKER, PeerProcess
from longtail.bench.common.subject import Subject, drafter_maker, open_subject
from longtail.bench.engine import PLAIN, STRATEGIES, TUNED, EngineBench, Turn, summarize
from longtail.bench.options import EngineBenchOptions
from longtail.errors import ConfigError, DataError
from longtail.types import SamplingParams

OPTIONS = EngineBenchOptions(batches=(2,), dtype="float32", max_tokens=8, repeats=1)
SAMPLING = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    workshop = build(tmp_path_factory.mktemp("engine"))
    write_lines(workshop.prompts, *({"prompt": "say " + "x" * i} for i in range(1, 4)))
    return workshop


@pytest.fixture(scope="module")
def subject(workshop: Workshop) -> Subject:
    return opened(workshop)


def opened(workshop: Workshop, **changes: str) -> Subject:
    named = {"model": str(workshop.model), "source": str(workshop.prompts), **changes}
    return open_subject(**named, dtype="float32", num_prompts=4, sampling=SAMPLING, log=print)


def test_a_mistake_names_the_option(workshop: Workshop, subject: Subject) -> None:
    make = drafter_maker("history", subject.target, print)
    assert make() is not make(), "each turn has a new one"
    with pytest.raises(ConfigError, match="--drafter = 'nowhere'"):
        drafter_maker("nowhere", subject.target, print)
    with pytest.raises(DataError, match=r"--prompts = 'nowhere.jsonl'"):
        opened(workshop, source="nowhere.jsonl")
    with pytest.raises(ConfigError, match="--model"):
        opened(workshop, model=str(workshop.path / "no"))


def test_tuned_and_fixed_drafts_write_the_texts_of_plain_decoding(subject: Subject) -> None:
    cell = EngineBench(subject, OPTIONS, {}, print).measure(2)
    names = [PLAIN, *STRATEGIES, TUNED]
    assert [row.name for row in cell.rows] == names
    assert [row.differing_share for row in cell.rows] == [0.0] * len(names)
    assert cell.num_texts == 8
    assert 8 <= cell.num_tokens <= 8 * 8
    assert {row.accept_length >= 1.0 for row in cell.rows[1:-1]} == {True}
    assert cell.best_fixed in STRATEGIES


def turns(seconds: list[float], text: tuple[int, ...] = (1, 2), **more: Any) -> list[Turn]:
    plain = Turn(seconds=0.0, cpu_seconds=0.0, num_tokens=12, texts=(text, (3,)), **more)
    return [replace(plain, seconds=each, cpu_seconds=each) for each in seconds]


CONTESTANTS = {
    PLAIN: turns([2.0, 4.0, 2.0]),
    "chain 2": turns([1.0, 2.0, 1.0], accept_length=2.0),
    "chain 8": turns([2.0, 4.0, 2.0], text=(1, 9), accept_length=3.0),
    TUNED: turns([0.5, 1.0, 1.0], accept_length=2.5),
    "vllm": [replace(each, texts=()) for each in turns([4.0, 4.0, 4.0])],
}


def test_ratios_are_taken_within_each_turn_and_the_best_fixed_strategy_is_named() -> None:
    cell = summarize(4, CONTESTANTS)
    rows = {row.name: row for row in cell.rows}
    # The second turn ran on a machine twice as slow.
    assert rows["chain 2"].over_plain.numbers() == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert rows[TUNED].over_plain.numbers() == {"median": 4.0, "low": 2.0, "high": 4.0}
    assert (rows["chain 8"].differing_share, rows["vllm"].differing_share) == (0.5, None)
    assert cell.best_fixed == "chain 2"
    assert cell.tuned_over_best_fixed.median == 2.0
    assert (cell.num_texts, cell.num_tokens, cell.lowest_cpu_share) == (2, 12, 1.0)


def test_the_card_has_a_line_for_each_contestant_and_notes_a_shared_cpu() -> None:
    shared = [replace(each, cpu_seconds=0.7 * each.seconds) for each in CONTESTANTS[PLAIN]]
    cells = [summarize(4, CONTESTANTS), summarize(8, {**CONTESTANTS, PLAIN: shared})]
    lines = engine.table("title", cells).cells()
    assert [line[0] for line in lines] == [f"{n}, {name}" for n in (4, 8) for name in CONTESTANTS]
    assert lines[1][1:] == ["12", "2.00 (2.00-2.00)", "2.00", "0.0%"]
    gain, note = engine.sentences(cells)
    assert gain.startswith("With drafts, longtail generates 4.00x at 4, 4.00x at 8 running")
    assert note == "NOTE: other processes ran: a turn at 8 had 70% of its CPU."
    found = json.loads(json.dumps(engine.as_json(OPTIONS, cells, dtype="float32", peers={})))
    assert found["cells"][0]["rows"]["tuned"]["over_plain"]["median"] == 4.0


@pytest.mark.slow
def test_the_command_compares_with_transformers_and_ends_with_json(workshop: Workshop) -> None:
    allowed = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    words = ("--batches=2", "--max-tokens=6", "--repeats=1", "--dtype=float32")
    try:
        said = say("bench", "engine", f"--model={workshop.model}", f"--prompts={workshop.prompts}",
                   *words)  # fmt: skip
    finally:
        if allowed:
            os.sched_setaffinity(0, allowed)
    assert said.code == 0, said.err
    found = json.loads(said.out.splitlines()[-1])
    (cell,) = found["cells"]
    assert list(cell["rows"]) == [PLAIN, *STRATEGIES, TUNED, "transformers"]
    assert cell["rows"]["tuned"]["differing_share"] == 0.0
    assert found["peers"]["transformers"].startswith("transformers ")


def test_a_peer_that_cannot_load_is_reported_with_its_last_output(tmp_path: Path) -> None:
    spec = {"kind": "vllm", "model_dir": str(tmp_path), "dtype": "float32", "threads": 1}
    spec |= {"max_len": 9, "max_running": 1}
    for python, message in (
        # vLLM is not installed beside longtail
        (sys.executable, r"(?s)vllm process .* ended with exit code 1; .*Error"),
        ("/nowhere/python", "--vllm-python = '/nowhere/python'"),
    ):
        with pytest.raises(ConfigError, match=message):
            PeerProcess(python, ENGINE_WORKER, "vllm", spec, flag="--vllm-python")
