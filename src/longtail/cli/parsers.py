"""Argument parsers of all verbs, for `cli.main` and docs/cli.md; imports no torch."""

import argparse
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from longtail.bench.registry import BENCHES

Parser = argparse.ArgumentParser

CONFIGURED = {
    "train": "rl.RunConfig",
    "sft": "sft.SftConfig",
    "drafter train": "drafter.DrafterTrainConfig",
}
"""Configuration class, below `longtail.config`, of each verb that reads one."""

_WIDTH = 96
_DTYPES = ("float32", "bfloat16", "float64")
_MODEL = "named as model.path of train"
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def parsers() -> dict[str, Callable[[], Parser]]:
    """Return a builder of the parser of each command, by its words after `longtail`."""
    return {
        "train": _train,
        "sft": _sft,
        "drafter train": _drafter_train,
        "drafter eval": _drafter_eval,
        "drafter export": _drafter_export,
        "drafter import": _drafter_import,
        "generate": _generate,
        "serve": _serve,
        **{f"bench {name}": partial(_bench, name) for name in BENCHES},
        "report": _report,
        "view": _view,
        "doctor": _doctor,
    }


def config_class(verb: str) -> Any:
    """Import the configuration class of a verb."""
    module, _, name = CONFIGURED[verb].partition(".")
    return getattr(import_module(f"longtail.config.{module}"), name)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help of one width on every terminal, because docs/cli.md holds it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_WIDTH, max_help_position=28)


def _parser(name: str, description: str, **more: Any) -> Parser:
    formatter = _Formatter
    return Parser(
        f"longtail {name}",
        description=description,
        formatter_class=formatter,
        allow_abbrev=False,
        **more,
    )


def _option(parser: Any, flag: str, default: Any, text: str, metavar: str | None = None) -> None:
    """Declare an option whose default has the type of its values and stands in its help."""
    kind = type(default)
    shown = f"{default:g}" if kind is float else default
    parser.add_argument(
        flag,
        type=kind,
        default=default,
        metavar=metavar or _METAVARS[kind],
        help=f"{text} (default {shown})",
    )


def _configured(verb: str, description: str, more: str = "") -> Parser:
    """Build the parser of a verb whose options are its configuration."""
    from longtail.config import files

    known = ", ".join(files.recipes(verb))
    run = f"TOML file or recipe ({known})" if known else "TOML file"
    parser = _parser(
        verb,
        description,
        usage=f"longtail {verb} [RUN] [--dry-run] [--section.key VALUE ...]",
        epilog=files.describe(config_class(verb)),
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help=f"{run}; default: no file")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help=f"print the resolved configuration as TOML{more} and exit",
    )
    return parser


def _train() -> Parser:
    return _configured(
        "train",
        "Train a policy with reinforcement learning. A run that was stopped is resumed.",
        more=", with an estimate of memory,",
    )


def _sft() -> Parser:
    return _configured(
        "sft",
        "Fine-tune a model on prompts with completions. The loss covers the completions only.",
    )


def _drafter_train() -> Parser:
    return _configured(
        "drafter train",
        "Train an EAGLE drafter on completions of its target, generated first or read from files.",
    )


def _drafter_eval() -> Parser:
    parser = _parser("drafter eval", "Measure the acceptance of a drafter for its target.")
    _add_drafter_and_target(parser)
    _add_measurement(parser, n=32, max_tokens=1024)
    _option(parser, "--depth", 6, "depth of chains and trees")
    _option(parser, "--width", 2, "children per node of trees")
    _option(parser, "--size", 12, "nodes per tree")
    parser.add_argument(
        "--plot", metavar="FILE", help="also write a plot, PNG (needs the extra plots)"
    )
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    return parser


def _drafter_export() -> Parser:
    parser = _parser(
        "drafter export",
        "Write a drafter in the layout of vLLM, SGLang or speculators, with a model card.",
    )
    add, layouts = parser.add_argument, ("vllm", "sglang", "speculators", "hf")
    _add_drafter_and_target(parser)
    add("--to", required=True, choices=layouts, help="layout to write")
    add("--out", metavar="DIR", required=True, help="directory to create")
    add(
        "--base-model", metavar="NAME", help="name of the target on the model card (default: MODEL)"
    )
    add("--license", metavar="ID", help="license id of the Hugging Face hub (default: none)")
    add(
        "--export-dtype",
        choices=_DTYPES[:2],
        help="dtype of the written tensors (default: as stored)",
    )
    add("--no-measure", action="store_true", help="leave measured figures out of the model card")
    _add_measurement(parser, n=16, max_tokens=512)
    _option(parser, "--depth", 4, "depth of the measured chains")
    return parser


def _drafter_import() -> Parser:
    parser = _parser(
        "drafter import", "Convert a published EAGLE or EAGLE-3 drafter into a drafter directory."
    )
    add = parser.add_argument
    add(
        "directory",
        metavar="DIR",
        help="downloaded directory with config.json and safetensors files",
    )
    add("--out", metavar="DIR", required=True, help="directory to create")
    _option(parser, "--target", "tiny-reasoner", f"target, {_MODEL}", "MODEL")
    add(
        "--layer-ids",
        choices=("auto", "input", "output"),
        default="auto",
        help="meaning of eagle_aux_hidden_state_layer_ids: layer inputs (vLLM) or outputs (SGLang)",
    )
    add(
        "--window",
        metavar="N",
        type=int,
        help="attention window; 0: unbounded (default: as stored)",
    )
    _add_dtype(parser, "the target")
    _option(parser, "--threads", 1, "number of compute threads")
    return parser


def _add_drafter_and_target(parser: Parser) -> None:
    parser.add_argument(
        "drafter",
        metavar="DRAFTER",
        help="drafter name or directory, as for speculation.drafter of train",
    )
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help=f"target, {_MODEL} (default: that of the drafter's run, else tiny-reasoner)",
    )


def _add_dtype(parser: Parser, what: str) -> None:
    parser.add_argument(
        "--dtype",
        choices=("auto", *_DTYPES),
        default="auto",
        help=f"dtype of {what}; auto (default): as stored, or float32 where that is emulated",
    )


def _add_measurement(parser: Parser, *, n: int, max_tokens: int) -> None:
    parser.add_argument(
        "--prompts",
        metavar="SOURCE",
        help="prompts, as for data.source of train (default: those of the drafter's run)",
    )
    _option(parser, "--n", n, "number of prompts")
    _option(parser, "--max-tokens", max_tokens, "longest completion, tokens")
    _option(parser, "--temperatures", "0,0.6,1", "sampling temperatures", "X,X")
    _add_dtype(parser, "the target")
    _option(parser, "--seed", 0, "seed of generated prompts")
    _option(parser, "--threads", 1, "number of compute threads")


def _generate() -> Parser:
    parser = _parser(
        "generate", "Generate completions of a prompt. A single completion is streamed."
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help=f"model, {_MODEL}")
    add("--prompt", metavar="TEXT", help="prompt (default: standard input)")
    _option(parser, "--n", 1, "number of completions")
    _option(parser, "--max-tokens", 512, "longest completion, tokens")
    _option(parser, "--temperature", 1.0, "sampling temperature; 0: greedy")
    _option(parser, "--top-k", 0, "sample from the N most likely tokens; 0: all")
    _option(parser, "--top-p", 1.0, "sample from the most likely tokens of total probability X")
    _option(parser, "--min-p", 0.0, "smallest probability relative to the most likely token")
    add("--stop", metavar="TEXT", action="append", default=[], help="stop string; may be repeated")
    _option(parser, "--seed", 0, "seed of the sampling noise")
    _add_dtype(parser, "weights and KV cache")
    _option(parser, "--device", "auto", "device: auto, cpu, cuda or cuda:N", "DEVICE")
    _option(parser, "--threads", 0, "number of compute threads; 0: all cores")
    add("--batch-invariant", action="store_true", help="same bits in any batch, on a GPU, too")
    chat = parser.add_mutually_exclusive_group()
    chat.add_argument(
        "--chat", action="store_true", help="apply the chat template; fail without one"
    )
    chat.add_argument(
        "--raw",
        action="store_true",
        help="do not apply the chat template (default: apply it if there is one)",
    )
    _option(parser, "--drafter", "auto", "drafter, as for speculation.drafter of train", "NAME")
    add(
        "--show-drafts",
        choices=("auto", "always"),
        nargs="?",
        const="auto",
        help="colour drafted text; auto (the value if none is given): on a terminal only",
    )
    add("--json", action="store_true", help="print one JSON object per completion")
    return parser


def _serve() -> Parser:
    from longtail.serve import options

    parser = _parser("serve", "Serve a model with the OpenAI HTTP API, with speculative decoding.")
    options.add_arguments(parser)
    return parser


def _bench(name: str) -> Parser:
    parser = _parser(f"bench {name}", BENCHES[name].summary)
    BENCHES[name].add_arguments(parser)
    return parser


def _report() -> Parser:
    parser = _parser(
        "report",
        "Write report.html and rollout.png about a run: summary, rollout, decisions, costs.",
    )
    add = parser.add_argument
    add("run", metavar="RUN_DIR", help="run directory of longtail train")
    add(
        "--step", metavar="N", type=int, help="training step of the rollout to show (default: last)"
    )
    return parser


def _view() -> Parser:
    from longtail.view import options

    parser = _parser("view", "Show runs on a live web page, while they continue or afterwards.")
    options.add_arguments(parser)
    return parser


def _doctor() -> Parser:
    parser = _parser(
        "doctor", "Check packages, hardware and kernels, and print a remedy for what is missing."
    )
    add = parser.add_argument
    add(
        "--run",
        metavar="DIR",
        help="run with the cost model (default: newest in runs/) and open sockets to show",
    )
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return parser
