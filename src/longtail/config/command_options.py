"""Options of the commands that have no configuration."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from longtail.config.arguments import WORD
from longtail.config.sections import Dtype, NotNegative
from longtail.errors import ConfigError

API_KEY, VIEW_TOKEN = "LONGTAIL_API_KEY", "LONGTAIL_VIEW_TOKEN"
"""Variables of the environment with the secrets of the two servers."""
MOST_RUNS = 4
_AUTO = "as stored, or float32 where that is emulated"
_DRAFTER = "drafter name or directory, as for speculation.drafter of train"
_JSON = "print the JSON line only"
_MODEL = "model, named as model.path of train"
_THREADS = "number of compute threads"
_TARGET = "target model (default: that of the drafter's run, else smollm2)"
Word = Annotated[str, WORD]


@dataclass(kw_only=True)
class EvalOptions:
    """Options of `longtail drafter eval`."""

    drafter: Word = Field(description=_DRAFTER)
    target: str = Field("", description=_TARGET)
    prompts: str | None = Field(
        None, description="as data.source of train (default: held-out ones of the drafter's run)"
    )
    n: int = Field(32, ge=1, description="number of prompts")
    max_tokens: int = Field(1024, ge=1, description="longest completion, tokens")
    temperatures: tuple[NotNegative, ...] = Field((0, 0.6, 1), description="sampling temperatures")
    dtype: Dtype = Field("auto", description=f"dtype of the target; auto: {_AUTO}")
    seed: int = Field(0, description="seed of generated prompts")
    threads: int = Field(1, description=_THREADS)
    depth: int = Field(6, ge=1, description="depth of chains and trees")
    width: int = Field(2, ge=1, description="children per node of trees")
    size: int = Field(12, ge=1, description="nodes per tree")
    json: bool = Field(False, description=_JSON)


@dataclass(kw_only=True)
class ExportOptions:
    """Options of `longtail drafter export`."""

    drafter: Word = Field(description=_DRAFTER)
    target: str | None = Field(None, description=_TARGET)
    out: str = Field(description="directory to create")
    export_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="dtype of the written tensors (default: as stored)"
    )
    threads: int = Field(1, description=_THREADS)


@dataclass(kw_only=True)
class ImportOptions:
    """Options of `longtail drafter import`."""

    directory: Word = Field(
        description="downloaded directory with config.json and safetensors files"
    )
    out: str = Field(description="directory to create")
    target: str = Field("smollm2", description="target, named as model.path of train")
    layer_ids: Literal["auto", "input", "output"] = Field(
        "auto",
        description="meaning of eagle_aux_hidden_state_layer_ids: layer inputs (vLLM) or outputs "
        "(SGLang)",
    )
    threads: int = Field(1, description=_THREADS)


@dataclass(kw_only=True)
class MergeOptions:
    """Options of `longtail merge`."""

    run: Word = Field(description="run directory")
    out: str = Field(description="directory to create")


@dataclass(kw_only=True)
class GenerateOptions:
    """Options of `longtail generate`."""

    model: Word = Field(description=_MODEL)
    prompt: str | None = Field(None, description="prompt (default: standard input)")
    n: int = Field(1, ge=1, le=4096, description="number of completions")
    max_tokens: int = Field(512, ge=1, description="longest completion, tokens")
    temperature: float = Field(1.0, ge=0, description="sampling temperature; 0: greedy")
    top_k: int = Field(0, ge=0, description="sample from the N most likely tokens; 0: all")
    top_p: float = Field(
        1.0, description="sample from the most likely tokens of total probability X"
    )
    min_p: float = Field(
        0.0, ge=0, description="smallest probability relative to the most likely token"
    )
    stop: tuple[str, ...] = Field(
        (), description='stop string; may be repeated; with a comma as ["a,b"]'
    )
    seed: int = Field(0, description="seed of the sampling noise")
    dtype: Dtype = Field("auto", description=f"dtype of weights and KV cache; auto: {_AUTO}")
    device: str = Field("auto", description="auto or cpu; the engine generates on CPUs")
    threads: int = Field(0, description=f"{_THREADS}; 0: all cores")
    chat: bool = Field(False, description="apply the chat template; fail without one")
    raw: bool = Field(
        False, description="do not apply the chat template (default: apply it if there is one)"
    )
    drafter: str = Field("auto", description=_DRAFTER)
    show_drafts: bool = Field(False, description="colour drafted text")
    json: bool = Field(False, description="print one JSON object per completion")


@dataclass(kw_only=True)
class ServeOptions:
    """Options of `longtail serve`: the model, its address and its limits."""

    model: Word = Field(description=_MODEL)
    name: str = Field("", description="the model's name for clients; empty: the last part of MODEL")
    drafter: str = Field("auto", description=_DRAFTER)
    host: str = Field("127.0.0.1", description="any address but loopback needs an API key")
    port: int = Field(8000, ge=0, le=65535, description="0: any free port")
    api_key_file: str | None = Field(
        None, description=f"file with the API key (default: ${API_KEY})"
    )
    max_running: int = Field(32, ge=1, description="completions generated at a time")
    max_queue: int = Field(128, ge=0, description="completions that may wait; more are refused")
    max_len: int = Field(4096, ge=2, description="maximum tokens of prompt plus completion")
    kv_tokens: int = Field(
        0, ge=0, description="KV memory; 0: enough for --max-running completions of --max-len"
    )
    drain_s: float = Field(
        30.0, ge=0, le=10**6, description="seconds for unfinished requests on shutdown"
    )
    dtype: Dtype = Field("auto", description=f"dtype of weights and KV cache; auto: {_AUTO}")
    device: str = Field("auto", description="auto or cpu; the engine generates on CPUs")
    threads: int = Field(0, ge=0, description=f"{_THREADS}; 0: all cores")

    @property
    def served_name(self) -> str:
        """Name by which clients call the model."""
        return self.name or Path(self.model).resolve().name

    def __post_init__(self) -> None:
        """Raise ConfigError for options that do not fit each other."""
        if 0 < self.kv_tokens < self.max_len:
            raise ConfigError(
                f"--kv-tokens = {self.kv_tokens}: it cannot hold one request of --max-len = "
                f"{self.max_len} tokens; raise it, or give 0 to size it by --max-running"
            )
        if not self.served_name.isprintable():
            raise ConfigError(f"--name = {self.served_name!a}: give a name that can be printed")


@dataclass(kw_only=True)
class E2eBenchOptions:
    """Options of `longtail bench e2e`: the training run to measure, and how long."""

    run: Word = Field("smollm2", description="TOML file or recipe to measure")
    steps: int = Field(20, ge=1, description="training steps of each arm, at most run.steps of RUN")
    json: bool = Field(False, description=_JSON)
    overrides: tuple[str, ...] = Field(
        (), description="--section.key VALUE sets a field of RUN, as for longtail train"
    )


@dataclass(kw_only=True)
class ReportOptions:
    """Options of `longtail report`."""

    run: Word = Field(description="run directory of longtail train")


@dataclass(kw_only=True)
class ViewOptions:
    """Options of `longtail view`: the runs to show, and the address of the page."""

    runs: Annotated[tuple[str, ...], WORD] = Field(
        description=f"run directories of longtail train, up to {MOST_RUNS}, shown over each other"
    )
    host: str = Field("127.0.0.1", description="any address but loopback needs a token")
    port: int = Field(8001, ge=0, le=65535, description="0: any free port")
    token_file: str | None = Field(
        None, description=f"file with the token that the page's URL needs (default: ${VIEW_TOKEN})"
    )


@dataclass(kw_only=True)
class DoctorOptions:
    """Options of `longtail doctor`."""

    model: Annotated[str | None, WORD] = Field(
        None, description="model whose end tokens and speed limits to show, named as model.path"
    )
