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
from longtail.bench.common.subject import Drafters, Subject, open_subject
from longtail.bench.common.vllm_process import VllmProcess
from longtail.bench.engine import PLAIN, TUNED, Turn, measure, summarize
from longtail.bench.options import EngineBenchOptions
from longtail.config.rl import load
from longtail.errors import ConfigError, DataError

OPTIONS = EngineBenchOptions(batches=(2,), texts=8, repeats=1)
WORDS = (
    "--data.heldout_size=2",
    "--rollout.group_size=4",
    "--rollout.max_tokens=8",
    "--rollout.dtype=float32",
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    workshop = build(tmp_path_factory.mktemp("engine"))
    write_lines(workshop.prompts, *({"prompt": "say " + "x" * i} for i in range(1, 9)))
    return workshop


@pytest.fixture(scope="module")
def subject(workshop: Workshop) -> Subject:
    return opened(workshop)


def opened(workshop: Workshop, **changes: str) -> Subject:
    named = {"model.path": str(workshop.model), "data.source": str(workshop.prompts), **changes}
    config = load(None, [*WORDS, *(f"--{name}={value}" for name, value in named.items())])
    return open_subject(config, 16, print)


def test_a_mistake_names_the_field(workshop: Workshop, subject: Subject) -> None:
    with pytest.raises(ConfigError, match=r"speculation\.drafter = 'nowhere'"):
        Drafters("nowhere", subject, 0, print)
    with pytest.raises(DataError, match=r"data.source = 'nowhere.jsonl'"):
        opened(workshop, **{"data.source": "nowhere.jsonl"})
    with pytest.raises(ConfigError, match=r"model\.path"):
        opened(workshop, **{"model.path": str(workshop.path / "no")})


@pytest.mark.parametrize("warm", [0, 8])
def test_drafters_alone_and_together_write_the_texts_of_plain_decoding(
    subject: Subject, warm: int
) -> None:
    drafters = Drafters("history+fresh" if warm else "history", subject, warm, print)
    options = replace(OPTIONS, warm=warm)
    cell = measure(subject, drafters, options, {}, print, 2)
    alone = ["history", "fresh"] if warm else []
    names = [PLAIN, *alone, TUNED]
    rows = cell["rows"]
    assert list(rows) == names
    assert [row["differing_share"] for row in rows.values()] == [0.0] * len(names)
    assert cell["num_texts"] == 8
    assert 8 <= cell["num_tokens"] <= 8 * 8
    assert (rows[PLAIN]["accept_length"], rows[PLAIN]["seconds_share"]) == (0, 0)
    assert all(row["seconds_share"] > 0 for row in rows.values() if row["nodes_share"])


def turns(seconds: list[float], text: tuple[int, ...] = (1, 2), **more: Any) -> list[Turn]:
    plain = Turn(seconds=0.0, cpu_seconds=0.0, num_tokens=12, texts=(text, (3,)), **more)
    return [replace(plain, seconds=each, cpu_seconds=each) for each in seconds]


CONTESTANTS = {
    PLAIN: turns([2.0, 4.0, 2.0]),
    "history": turns([1.0, 2.0, 1.0], accept_length=2.0, seconds_share=0.9, nodes_share=1.25),
    "fresh": turns([2.0, 4.0, 2.0], text=(1, 9), accept_length=3.0),
    TUNED: turns([0.5, 1.0, 1.0], accept_length=2.5),
    "vllm": [replace(each, texts=()) for each in turns([4.0, 4.0, 4.0])],
}


def test_ratios_are_taken_within_each_turn() -> None:
    cell = summarize(4, CONTESTANTS)
    rows = cell["rows"]
    # The second turn ran on a machine twice as slow.
    assert rows["history"]["over_plain"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert rows[TUNED]["over_plain"] == {"median": 4.0, "low": 2.0, "high": 4.0}
    assert (rows["fresh"]["differing_share"], rows["vllm"]["differing_share"]) == (0.5, None)
    assert (cell["num_texts"], cell["num_tokens"], cell["lowest_cpu_share"]) == (6, 36, 1.0)


def test_the_card_has_a_line_for_each_contestant_and_notes_a_shared_cpu(subject: Subject) -> None:
    shared = [replace(each, cpu_seconds=0.7 * each.seconds) for each in CONTESTANTS[PLAIN]]
    cells = [summarize(4, CONTESTANTS), summarize(8, {**CONTESTANTS, PLAIN: shared})]
    lines = engine.table("title", cells).cells()
    assert [line[0] for line in lines] == [f"{n}, {name}" for n in (4, 8) for name in CONTESTANTS]
    assert lines[1][1:] == ["12", "2.00 (2.00-2.00)", "2.00", "0.0%", "0.90, 1.25"]
    gain, note = engine.sentences(cells)
    assert gain.startswith("With drafts, longtail generates 4.00x at 4, 4.00x at 8 running")
    assert note == "NOTE: other processes ran: a turn at 8 had 70% of its CPU."
    told = engine.as_json(OPTIONS, subject, cells, drafters=["history"], peers={})
    found = json.loads(json.dumps(told))
    assert (found["group_size"], found["max_tokens"], found["dtype"]) == (4, 8, "float32")
    assert found["cells"][0]["rows"]["tuned"]["over_plain"]["median"] == 4.0


@pytest.mark.slow
def test_the_command_compares_with_transformers_and_ends_with_json(workshop: Workshop) -> None:
    allowed = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    run = workshop.path / "run.toml"
    run.write_text(f"[model]\npath = '{workshop.model}'\n[data]\nsource = '{workshop.prompts}'\n")
    words = ("--batches=2", "--repeats=1", "--speculation.drafter=history", *WORDS)
    try:
        said = say("bench", "engine", str(run), *words)
    finally:
        if allowed:
            os.sched_setaffinity(0, allowed)
    assert said.code == 0, said.err
    found = json.loads(said.out.splitlines()[-1])
    (cell,) = found["cells"]
    assert list(cell["rows"]) == [PLAIN, TUNED, "transformers"]
    assert cell["rows"]["tuned"]["differing_share"] == 0.0
    assert found["peers"]["transformers"].startswith("transformers ")


def test_a_peer_that_cannot_load_is_reported_with_its_last_output(tmp_path: Path) -> None:
    spec = {"model_dir": str(tmp_path), "dtype": "float32", "threads": 1, "max_len": 9}
    spec["max_running"] = 1
    for python, message in (
        # vLLM is not installed beside longtail
        (sys.executable, r"(?s)vllm process .* ended with exit code 1; .*Error"),
        ("/nowhere/python", "--vllm-python = '/nowhere/python'"),
    ):
        with pytest.raises(ConfigError, match=message):
            VllmProcess(python, spec, flag="--vllm-python")
