"""`longtail bench vllm`: does an exported drafter draft as well in vLLM as it does here?

    drafter --export--> directory --> vLLM, in its own environment    --> accept length
       |                                                                       : ratio
       +--> this engine, chains as deep, the window that vLLM keeps to --> accept length

At temperature 0 a chain's acceptance is a matter of the drafter alone, so both must agree but for
what is counted at the end of a text. Counts, not speed, so it may share the machine.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longtail.errors import ConfigError, LongtailError

_WORKER = Path(__file__).with_name("worker.py")
_METHODS = {"eagle1": "eagle", "eagle3": "eagle3"}
_COLUMNS = (
    "drafter", "layout", "window", "here", "in vLLM", "ratio", "same texts", "as trained",
)  # fmt: skip
TOLERANCE = 0.05
"""Of the ratio: both engines count the last draft of a text in their own way."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--python", metavar="PATH", required=True, help="python of an environment with vLLM")
    add(
        "--drafters",
        metavar="NAMES",
        default="tiny-reasoner:eagle1,tiny-reasoner:eagle3",
        help="joined by commas (default: both of the tiny reasoner)",
    )
    add("--target", metavar="MODEL", default="tiny-reasoner", help="(default tiny-reasoner)")
    add("--prompts", metavar="SOURCE", help="as data.source of train; default: the held-out ones")
    add("--n", metavar="N", type=int, default=16, help="prompts (default 16)")
    add("--max-tokens", metavar="N", type=int, default=512, help="(default 512)")
    add("--depth", metavar="N", type=int, default=4, help="of the chains (default 4)")
    add("--timeout", metavar="S", type=int, default=600, help="of one vLLM (default 600)")
    add("--json", action="store_true", help="print the JSON line only")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One exported directory, here and in vLLM.

    Example: Comparison(drafter="d", layout="vllm", window=32, ours=4.0, as_trained=4.0,
                        theirs=4.02, same_texts=1.0, engine="vllm 0.32.0", num_drafts=112)
    """

    drafter: str
    layout: str
    window: int
    """That vLLM keeps to, and we for the comparison; 0: unbounded."""
    ours: float
    as_trained: float
    """With the drafter's own window."""
    theirs: float
    same_texts: float
    """Share of completions that are equal."""
    engine: str
    num_drafts: int

    @property
    def ratio(self) -> float:
        """Their accept length over ours."""
        return self.theirs / self.ours

    def row(self) -> tuple[str, ...]:
        """Return the cells of the card."""
        window = str(self.window) if self.window else "unbounded"
        return (
            self.drafter, self.layout, window, f"{self.ours:.3f}", f"{self.theirs:.3f}",
            f"{self.ratio:.3f}", f"{self.same_texts:.0%}", f"{self.as_trained:.3f}",
        )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Compare, print the card, and end with one JSON line; 1 if they disagree."""
    from longtail.bench.common.report import finish, pin_threads
    from longtail.programs.drafter_eval import open_target

    pin_threads(1)
    names = args.drafters.split(",")
    wanted = Namespace(**vars(args), dtype="float32", drafter=names[0], seed=0)
    target, prompts = open_target(wanted)
    found = [each for name in names for each in _compare(name, target, prompts, args)]
    result = {
        "bench": "vllm",
        "depth": args.depth,
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "compared": [{**asdict(each), "ratio": each.ratio} for each in found],
    }
    title = f"accept length in {found[0].engine} and here: chains of {args.depth}, temperature 0"
    finish(title, _COLUMNS, [each.row() for each in found], result, json_only=args.json)
    return 0 if all(abs(each.ratio - 1) <= TOLERANCE for each in found) else 1


def _compare(
    name: str, target: Any, prompts: Sequence[tuple[int, ...]], args: argparse.Namespace
) -> list[Comparison]:
    """Export in each layout that vLLM loads, and draft for the same prompts on both sides."""
    from longtail.build.drafters import read_drafter
    from longtail.drafter.formats.layouts import engine_window
    from longtail.programs.drafter_export import rounded, write_layout

    loaded = read_drafter(name, target, _say, target.model.dtype)
    if loaded is None:
        raise ConfigError(f"--drafters: {name} has no EAGLE layer to export")
    loaded = rounded(loaded, target.model.dtype)
    config, found = loaded.layer.config, []
    as_trained, texts = _ours(loaded, target, prompts, args, config.window)
    for layout in ("vllm", "speculators") if config.recipe == "eagle3" else ("vllm",):
        _say(f"{name}, layout {layout}")
        window = engine_window(layout, config)
        ours = as_trained
        if window != config.window:
            ours = _ours(loaded, target, prompts, args, window)[0]
        with tempfile.TemporaryDirectory() as place:
            directory = Path(place) / "drafter"
            verifier = str(target.directory)
            write_layout(directory, layout, loaded, target, verifier=verifier, depth=args.depth)
            theirs = _ask(directory, _METHODS[config.recipe], target, prompts, args)
        same = sum(a == tuple(b) for a, b in zip(texts, theirs["tokens"], strict=True))
        found.append(
            Comparison(
                drafter=name,
                layout=layout,
                window=window,
                ours=ours,
                as_trained=as_trained,
                theirs=1 + theirs["num_accepted"] / max(theirs["num_drafts"], 1),
                same_texts=same / len(texts),
                engine=theirs["engine"],
                num_drafts=theirs["num_drafts"],
            )
        )
    return found


def _ours(
    loaded: Any,
    target: Any,
    prompts: Sequence[tuple[int, ...]],
    args: argparse.Namespace,
    window: int,
) -> tuple[float, list[tuple[int, ...]]]:
    from longtail.build.drafters import at_work
    from longtail.engine.speculation.speculator import Speculation
    from longtail.programs.drafter_eval import complete
    from longtail.programs.drafter_export import copy_of
    from longtail.speculation.strategy import Strategy
    from longtail.types import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=args.max_tokens, stop_token_ids=target.tokenizer.eos_ids
    )
    drafter = at_work(copy_of(loaded), target, window=window)
    fixed = Speculation.fixed(drafter, Strategy(depth=args.depth))
    completions, acceptance = complete(target, prompts, sampling, fixed)
    return acceptance.overall.mean, [each.tokens for each in completions]


def _ask(
    drafter: Path,
    method: str,
    target: Any,
    prompts: Sequence[tuple[int, ...]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Have vLLM write, in a process of the interpreter given."""
    asked = {
        "target": str(target.directory),
        "drafter": str(drafter),
        "method": method,
        "depth": args.depth,
        "dtype": "float32",
        "prompts": [list(prompt) for prompt in prompts],
        "max_tokens": args.max_tokens,
        "stop_token_ids": list(target.tokenizer.eos_ids),
        "max_len": max(map(len, prompts)) + args.max_tokens + args.depth + 1,
    }
    try:
        done = subprocess.run(
            [args.python, "-I", str(_WORKER)],  # -I: nothing of ours shadows its modules
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=args.timeout,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"--python = {args.python!r}: vLLM cannot be asked ({error}); name the python of an "
            "environment that has it, or raise --timeout"
        ) from error
    if done.returncode:
        last_words = "\n".join(done.stderr.splitlines()[-12:])
        raise LongtailError(f"vLLM ended with exit code {done.returncode}:\n{last_words}")
    answered: dict[str, Any] = json.loads(done.stdout)
    return answered


def _say(text: str) -> None:
    print(f"bench vllm: {text}", file=sys.stderr, flush=True)
