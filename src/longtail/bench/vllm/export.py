"""An exported drafter's accept length in vLLM against that in this engine.

    drafter --export--> directory --> vLLM, in its own environment         --> accept length
       |                                                                            : ratio
       +--> this engine, with chains as deep and the window that vLLM uses --> accept length

At temperature 0 the acceptance of a chain depends on the drafter alone, so both must agree except
for what is counted at the end of a text. Counts are compared, not speed.
"""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from longtail.assembly.drafters import at_work, read_drafter
from longtail.bench.common.card import Table
from longtail.bench.common.process import progress
from longtail.bench.vllm.options import VllmBenchOptions
from longtail.drafter.formats.layouts import engine_window
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import ConfigError, LongtailError
from longtail.programs.drafter_eval import complete
from longtail.programs.drafter_export import copy_of, rounded, write_layout
from longtail.speculation.strategy import Strategy
from longtail.types import SamplingParams

_WORKER = Path(__file__).with_name("worker.py")
METHODS = {"eagle1": "eagle", "eagle3": "eagle3"}
"""vLLM's name of each recipe."""
TOLERANCE = 0.05
"""Largest deviation of the ratio from 1: the engines count the last draft of a text differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One exported directory, in this engine and in vLLM."""

    drafter: str
    layout: str
    window: int
    """Window of vLLM, also used here for the comparison; 0: unbounded."""
    ours: float
    """Accept length in this engine."""
    as_trained: float
    """The same with the drafter's own window."""
    theirs: float
    """Accept length in vLLM."""
    same_texts: float
    """Share of equal completions."""
    engine: str
    num_drafts: int

    @property
    def ratio(self) -> float:
        """Accept length in vLLM over that in this engine."""
        return self.theirs / self.ours


_COLUMNS = {
    "drafter": lambda each: each.drafter,
    "layout": lambda each: each.layout,
    "window": lambda each: each.window or "unbounded",
    "longtail": lambda each: f"{each.ours:.3f}",
    "vLLM": lambda each: f"{each.theirs:.3f}",
    "vLLM / longtail": lambda each: f"{each.ratio:.3f}",
    "same texts": lambda each: f"{each.same_texts:.0%}",
    "own window": lambda each: f"{each.as_trained:.3f}",
}


@final
class ExportBench:
    """One target with its prompts."""

    def __init__(
        self, options: VllmBenchOptions, target: Any, prompts: Sequence[tuple[int, ...]]
    ) -> None:
        self._options, self._target, self._prompts = options, target, prompts
        self._log = progress("vllm")

    def table(self, found: Sequence[Comparison]) -> Table:
        """Return the table of all comparisons."""
        depth = self._options.depth
        title = f"Accept length in {found[0].engine} and in longtail: chains of {depth}, greedy"
        return Table(title, _COLUMNS, found)

    def agree(self, found: Sequence[Comparison]) -> bool:
        """Return whether both engines accept equally often."""
        return all(abs(each.ratio - 1) <= TOLERANCE for each in found)

    def compare(self, name: str) -> list[Comparison]:
        """Export in each layout that vLLM loads, and draft for the same prompts in both engines."""
        target, dtype = self._target, self._target.model.dtype
        loaded = read_drafter(name, target, self._log, dtype)
        if loaded is None:
            raise ConfigError(f"--drafters: {name} has no EAGLE layer to export")
        loaded = rounded(loaded, dtype)
        config, found = loaded.layer.config, []
        as_trained, texts = self._ours(loaded, config.window)
        for layout in ("vllm", "speculators") if config.recipe == "eagle3" else ("vllm",):
            self._log(f"{name}, layout {layout}")
            window, ours = engine_window(layout, config), as_trained
            if window != config.window:
                ours = self._ours(loaded, window)[0]
            with tempfile.TemporaryDirectory() as place:
                directory = Path(place) / "drafter"
                write_layout(
                    directory,
                    layout,
                    loaded,
                    target,
                    verifier=str(target.directory),
                    depth=self._options.depth,
                )
                theirs = self._theirs(directory, METHODS[config.recipe])
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

    def _ours(self, loaded: Any, window: int) -> tuple[float, list[tuple[int, ...]]]:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=self._options.max_tokens,
            stop_token_ids=self._target.tokenizer.eos_ids,
        )
        drafter = at_work(copy_of(loaded), self._target, window=window)
        fixed = Speculation.fixed(drafter, Strategy(depth=self._options.depth))
        completions, acceptance = complete(self._target, self._prompts, sampling, fixed)
        return acceptance.overall.mean, [each.tokens for each in completions]

    def _theirs(self, drafter: Path, method: str) -> dict[str, Any]:
        """Run vLLM in a process of the given interpreter."""
        options = self._options
        job = {
            "target": str(self._target.directory),
            "drafter": str(drafter),
            "method": method,
            "depth": options.depth,
            "dtype": "float32",
            "prompts": [list(prompt) for prompt in self._prompts],
            "max_tokens": options.max_tokens,
            "stop_token_ids": list(self._target.tokenizer.eos_ids),
            "max_len": max(map(len, self._prompts)) + options.max_tokens + options.depth + 1,
        }
        try:
            done = subprocess.run(
                [options.python, "-I", str(_WORKER)],  # -I: our modules must not shadow vLLM's
                input=json.dumps(job),
                capture_output=True,
                text=True,
                timeout=options.timeout,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(
                f"--python = {options.python!r}: vLLM cannot be run ({error}); name the python of "
                "an environment that has it, or raise --timeout"
            ) from error
        if done.returncode:
            last_lines = "\n".join(done.stderr.splitlines()[-12:])
            raise LongtailError(f"vLLM ended with exit code {done.returncode}:\n{last_lines}")
        answered: dict[str, Any] = json.loads(done.stdout)
        return answered
