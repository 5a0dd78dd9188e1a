"""Options of the commands without a configuration, except those of `bench` and of servers.

Programs take theirs as an argparse Namespace.
"""

import argparse
from dataclasses import dataclass
from typing import Annotated, Literal

from longtail.config.options import Json, Option
from longtail.config.sections import Dtype

_AUTO = "as stored, or float32 where that is emulated"
_DRAFTER = "drafter name or directory, as for speculation.drafter of train"
_TARGET = "target model (default: that of the drafter's run, else smollm2)"


@dataclass(kw_only=True)
class EvalOptions(argparse.Namespace):
    """Options of `longtail drafter eval`."""

    drafter: Annotated[str, Option(_DRAFTER, positional=True)]
    target: Annotated[str | None, Option(_TARGET)] = None
    prompts: Annotated[
        str | None,
        Option("as data.source of train (default: held-out ones of the drafter's run)"),
    ] = None
    n: Annotated[int, Option("number of prompts", low=1)] = 32
    max_tokens: Annotated[int, Option("longest completion, tokens", low=1)] = 1024
    temperatures: Annotated[tuple[float, ...], Option("sampling temperatures", low=0)] = (0, 0.6, 1)
    dtype: Annotated[Dtype, Option(f"dtype of the target; auto: {_AUTO}")] = "auto"
    seed: Annotated[int, Option("seed of generated prompts")] = 0
    threads: Annotated[int, Option("number of compute threads")] = 1
    depth: Annotated[int, Option("depth of chains and trees", low=1)] = 6
    width: Annotated[int, Option("children per node of trees", low=1)] = 2
    size: Annotated[int, Option("nodes per tree", low=1)] = 12
    json: Json = False


@dataclass(kw_only=True)
class ExportOptions(argparse.Namespace):
    """Options of `longtail drafter export`."""

    drafter: Annotated[str, Option(_DRAFTER, positional=True)]
    target: Annotated[str | None, Option(_TARGET)] = None
    out: Annotated[str, Option("directory to create")]
    export_dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        Option("dtype of the written tensors (default: as stored)"),
    ] = None
    threads: Annotated[int, Option("number of compute threads")] = 1


@dataclass(kw_only=True)
class MergeOptions(argparse.Namespace):
    """Options of `longtail merge`."""

    run: Annotated[str, Option("run directory", positional=True)]
    out: Annotated[str, Option("directory to create")]


@dataclass(kw_only=True)
class ImportOptions(argparse.Namespace):
    """Options of `longtail drafter import`."""

    directory: Annotated[
        str,
        Option("downloaded directory with config.json and safetensors files", positional=True),
    ]
    out: Annotated[str, Option("directory to create")]
    target: Annotated[str, Option("target, named as model.path of train")] = "smollm2"
    layer_ids: Annotated[
        Literal["auto", "input", "output"],
        Option(
            "meaning of eagle_aux_hidden_state_layer_ids: layer inputs (vLLM) or outputs (SGLang)"
        ),
    ] = "auto"
    threads: Annotated[int, Option("number of compute threads")] = 1


@dataclass(kw_only=True)
class GenerateOptions:
    """Options of `longtail generate`."""

    model: Annotated[str, Option("model, named as model.path of train", positional=True)]
    prompt: Annotated[str | None, Option("prompt (default: standard input)")] = None
    n: Annotated[int, Option("number of completions", low=1, high=4096)] = 1
    max_tokens: Annotated[int, Option("longest completion, tokens", low=1)] = 512
    temperature: Annotated[float, Option("sampling temperature; 0: greedy", low=0)] = 1.0
    top_k: Annotated[int, Option("sample from the N most likely tokens; 0: all", low=0)] = 0
    top_p: Annotated[float, Option("sample from the most likely tokens of total probability X")] = (
        1.0
    )
    min_p: Annotated[
        float, Option("smallest probability relative to the most likely token", low=0)
    ] = 0.0
    stop: Annotated[
        tuple[str, ...], Option('stop string; may be repeated; with a comma as ["a,b"]')
    ] = ()
    seed: Annotated[int, Option("seed of the sampling noise")] = 0
    dtype: Annotated[Dtype, Option(f"dtype of weights and KV cache; auto: {_AUTO}")] = "auto"
    device: Annotated[str, Option("device: auto or cpu; the engine generates on CPUs")] = "auto"
    threads: Annotated[int, Option("number of compute threads; 0: all cores")] = 0
    chat: Annotated[bool, Option("apply the chat template; fail without one")] = False
    raw: Annotated[
        bool, Option("do not apply the chat template (default: apply it if there is one)")
    ] = False
    drafter: Annotated[str, Option("drafter, as for speculation.drafter of train")] = "auto"
    show_drafts: Annotated[bool, Option("colour drafted text")] = False
    json: Annotated[bool, Option("print one JSON object per completion")] = False


@dataclass(kw_only=True)
class ReportOptions(argparse.Namespace):
    """Options of `longtail report`."""

    run: Annotated[str, Option("run directory of longtail train", positional=True)]


@dataclass(kw_only=True)
class DoctorOptions:
    """Options of `longtail doctor`."""

    model: Annotated[
        str | None,
        Option(
            "model whose end tokens and speed limits to show, named as model.path",
            positional=True,
        ),
    ] = None
