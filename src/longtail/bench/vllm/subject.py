"""A target with its drafters as vLLM loads them, its prompts, and longtail's own texts."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import longtail
from longtail.assembly.drafters import Target, read_drafter
from longtail.bench.common.peers import PeerProcess
from longtail.bench.vllm.export import METHODS
from longtail.bench.vllm.options import VllmBenchOptions
from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.errors import ConfigError
from longtail.programs.drafter_eval import complete
from longtail.programs.drafter_export import copy_of, rounded, write_layout
from longtail.sampling import noise_key
from longtail.system.device import DTYPES
from longtail.types import SamplingParams

_WORKER = Path(__file__).with_name("rules_worker.py")
_PACKAGES = Path(longtail.__file__).parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One turn of vLLM over all prompts."""

    tokens: tuple[tuple[int, ...], ...]
    num_drafts: int
    num_accepted: int
    seconds: float
    cpu_seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def accept_length(self) -> float:
        """Tokens per verified step, the bonus token included."""
        return 1 + self.num_accepted / max(self.num_drafts, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A target, two exported drafters and the seeds of the texts."""

    target: Target
    prompts: Sequence[tuple[int, ...]]
    drafter: Path
    """Directory of the drafter in vLLM's layout."""
    earlier: Path
    """Directory of a weaker drafter of the same shape."""
    name: str
    method: str
    options: VllmBenchOptions

    def start(self, rule: str, drafter: Path | None = None) -> "Engine":
        """Start vLLM with a rule of drafting, and with another drafter if one is given."""
        options = self.options
        longest = max(map(len, self.prompts)) + options.max_tokens + options.depth + 1
        argument = {
            "target": str(self.target.directory),
            "drafter": str(drafter or self.drafter),
            "method": self.method,
            "depth": options.depth,
            "dtype": options.dtype,
            "rule": rule,
            "block_rows": options.block_rows,
            "max_len": longest,
            "max_running": options.max_running,
            "packages": str(_PACKAGES),
            "threads": 1,
        }
        return Engine(options.python, argument, self)

    def own_texts(self, turn: int) -> list[tuple[int, ...]]:
        """Return the texts that longtail's engine writes with the seeds of a turn."""
        assert turn == 0, "longtail's engine writes the texts of the first turn"
        sampling = SamplingParams(
            temperature=self.options.temperature,
            max_tokens=self.options.max_tokens,
            stop_token_ids=self.target.tokenizer.eos_ids,
        )
        done = complete(self.target, self.prompts, sampling, None)[0]
        return [each.tokens for each in done]


class Engine(PeerProcess):
    """A running vLLM; `turn` generates for all prompts."""

    def __init__(self, python: str, spec: Mapping[str, Any], subject: Subject) -> None:
        super().__init__(python, _WORKER, "vllm", spec, flag="--python")
        self._subject = subject

    def turn(self, number: int, *, adopt: Path | None = None) -> Reply:
        """Generate with the seeds of a turn; adopt a drafter in the middle if one is given."""
        subject = self._subject
        answer = self.ask(
            {
                "prompts": [list(prompt) for prompt in subject.prompts],
                "seeds": [seed(number, index) for index in range(len(subject.prompts))],
                "temperature": subject.options.temperature,
                "max_tokens": subject.options.max_tokens,
                "stop_token_ids": list(subject.target.tokenizer.eos_ids),
                "adopt": None if adopt is None else str(adopt),
            }
        )
        answer["tokens"] = tuple(map(tuple, answer["tokens"]))
        return Reply(**answer)


def seed(turn: int, index: int) -> int:
    """Return the noise key of a prompt; those of the first turn are `complete`'s."""
    return noise_key(turn, "drafter eval", index)


def differing_share(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Return the share of texts that are not equal."""
    pairs = zip(texts, others, strict=True)
    return sum(tuple(a) != tuple(b) for a, b in pairs) / len(texts)


@contextmanager
def open_subject(
    options: VllmBenchOptions,
    target: Target,
    prompts: Sequence[tuple[int, ...]],
    log: Callable[[str], None],
) -> Iterator[Subject]:
    """Export the last of the drafters, and the earlier one, for as long as the context lasts."""
    name = options.drafters[-1]
    loaded = _read(name, target, log)
    if options.earlier is None:
        earlier = copy_of(loaded)
        earlier.layer.initialize(torch.Generator().manual_seed(0))
    else:
        earlier = _read(options.earlier, target, log)
    dtype = DTYPES[options.dtype]
    with tempfile.TemporaryDirectory() as place:
        paths = {}
        for key, each in {"drafter": loaded, "earlier": earlier}.items():
            paths[key] = Path(place) / key
            write_layout(
                paths[key],
                "vllm",
                rounded(replace(each), dtype),
                target,
                verifier=str(target.directory),
                depth=options.depth,
            )
        yield Subject(
            target=target,
            prompts=prompts,
            name=name,
            method=METHODS[loaded.layer.config.recipe],
            options=options,
            **paths,
        )


def _read(name: str, target: Target, log: Callable[[str], None]) -> LoadedDrafter:
    found: Any = read_drafter(name, target, log, torch.float32)
    if found is None:
        raise ConfigError(f"--drafters: {name} has no EAGLE layer to export")
    return found
