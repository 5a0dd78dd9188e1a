"""Options of the benchmarks: one dataclass makes the command line and reads it back."""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from longtail.bench.common.options import Json, Option, add_arguments, read
from longtail.bench.registry import BENCHES
from longtail.errors import ConfigError
from support.benches import parse


@dataclass(frozen=True, kw_only=True)
class Example:
    """One option of every kind."""

    place: Annotated[str, Option("required")]
    names: Annotated[tuple[str, ...], Option("names", choices=("a", "b"))] = ("a", "b")
    sizes: Annotated[tuple[int, ...], Option("sizes", low=1, high=9, quick=(1,))] = (1, 8)
    share: Annotated[float, Option("share", low=0)] = 0.5
    kind: Annotated[str | None, Option("kind", choices=("x", "y"))] = None
    clean: Annotated[bool, Option("leave out the cleaning")] = True
    quick: Annotated[bool, Option("smaller defaults:")] = False
    json: Json = False


def example(*words: str) -> Any:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Example)
    return read(Example, parser.parse_args(["--place", "here", *words]))


def test_an_option_that_is_not_given_has_its_default() -> None:
    assert example() == Example(place="here")


def test_options_are_read_by_their_types() -> None:
    words = ("--names=b", "--sizes=2,9", "--share=0.25", "--kind=y", "--no-clean", "--json")
    assert example(*words) == Example(
        place="here", names=("b",), sizes=(2, 9), share=0.25, kind="y", clean=False, json=True
    )


def test_quick_changes_defaults_and_a_given_option_wins() -> None:
    assert example("--quick").sizes == (1,)
    assert example("--quick", "--sizes", "3").sizes == (3,)


def test_the_help_shows_choices_and_defaults() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Example)
    text = " ".join(parser.format_help().split())
    for line in (
        "--names A,B names: a, b (default: all)",
        "--sizes N,N sizes (default 1,8)",
        "--share X share (default 0.5)",
        "--no-clean leave out the cleaning",
        "--quick smaller defaults: --sizes 1",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--names", "a,c"), "--names: 'c' is not one of a, b"),
        (("--sizes", "1,zero"), "--sizes = '1,zero': it must be numbers from 1 to 9, as in 1,8"),
        (("--sizes", "0"), "--sizes = '0': it must be numbers from 1 to 9"),
        (("--share", "-1"), "--share = -1.0: it must be at least 0"),
    ],
)
def test_a_wrong_value_is_refused_with_option_value_and_remedy(
    words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        example(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("engine --batches 1,zero", "--batches = '1,zero': it must be numbers from 1 to 256"),
        ("engine --max-tokens 1", "--max-tokens = 1: it must be at least 2"),
        ("engine --threads 0", "--threads = 0: it must be from 1"),
        ("learner --repeats 0", "--repeats = 0: it must be from 1"),
        ("trl --completions 12", "--completions = 12: it must be a multiple of --group = 8"),
        ("e2e --arms off,warm", "--arms: 'warm' is not one of off"),
        ("e2e --arms spot,off", "--arms = 'spot,off': off comes first"),
        ("e2e --arms off", "--arms = 'off': off comes first, and others"),
        ("e2e --arms off,spot,spot", "each arm is given once"),
        ("e2e --steps 0", "--steps = 0: it must be at least 1"),
        ("gpu --parts steps,walks", "--parts: 'walks' is not one of checks, attention"),
        ("gpu --repeats 0", "--repeats = 0: it must be from 1 to 1000"),
        ("gpu --device cpu", "--device cpu: .* add --quick"),
        ("gpu --device tpu", "--device = 'tpu': it must be cuda"),
    ],
)
def test_each_benchmark_refuses_an_impossible_option_by_name(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*words.split())


@pytest.mark.parametrize("name", sorted({*BENCHES} - {"vllm", "gpu"}))
def test_every_benchmark_runs_on_a_real_model_without_options(name: str) -> None:
    options = parse(name)
    assert "smollm2" in (getattr(options, "model", None), getattr(options, "run", None))


def test_declaring_the_options_needs_no_torch() -> None:
    code = "import sys, longtail.bench.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
