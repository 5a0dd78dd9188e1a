"""Argument parsers of all verbs, for `cli.main` and docs/cli.md; imports no torch."""

import argparse
from collections.abc import Callable
from functools import partial

from longtail.bench.registry import BENCHES

_WIDTH = 96


def parsers() -> dict[str, Callable[[], argparse.ArgumentParser]]:
    """Return a builder of the parser of each command, by its words after `longtail`."""
    return {
        "train": train_parser,
        "sft": sft_parser,
        "drafter train": drafter_train_parser,
        "drafter eval": drafter_eval_parser,
        "drafter export": drafter_export_parser,
        "drafter import": drafter_import_parser,
        "generate": generate_parser,
        "serve": serve_parser,
        **{f"bench {name}": partial(bench_parser, name) for name in BENCHES},
        "report": report_parser,
        "doctor": doctor_parser,
    }


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help of one width on every terminal, because docs/cli.md holds it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_WIDTH, max_help_position=28)


def _parser(name: str, description: str, **more: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"longtail {name}",
        description=description,
        formatter_class=_Formatter,
        allow_abbrev=False,
        **more,  # type: ignore[arg-type]
    )


def train_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail train`."""
    from longtail.config import files as configfile
    from longtail.config import rl as config

    parser = _parser(
        "train",
        "Train a policy with reinforcement learning. A run that was stopped is resumed.",
        usage="longtail train [RUN] [--dry-run] [--section.key VALUE ...]",
        epilog=configfile.describe(config.RunConfig),
    )
    recipes = ", ".join(configfile.recipes())
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help=f"TOML file or recipe ({recipes}); default: no file"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved configuration as TOML, with an estimate of memory, and exit",
    )
    return parser


def sft_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail sft`."""
    from longtail.config import files as configfile
    from longtail.config import sft as sft_config

    parser = _parser(
        "sft",
        "Fine-tune a model on prompts with completions. The loss covers the completions only.",
        usage="longtail sft [RUN] [--dry-run] [--section.key VALUE ...]",
        epilog=configfile.describe(sft_config.SftConfig),
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="TOML file; default: no file")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration as TOML and exit"
    )
    return parser


def drafter_train_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail drafter train`."""
    from longtail.config import drafter as drafter_config
    from longtail.config import files as configfile

    parser = _parser(
        "drafter train",
        "Train an EAGLE drafter on completions of its target, generated first or read from files.",
        usage="longtail drafter train [RUN] [--dry-run] [--section.key VALUE ...]",
        epilog=configfile.describe(drafter_config.DrafterTrainConfig),
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="TOML file; default: no file")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration as TOML and exit"
    )
    return parser


def drafter_eval_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail drafter eval`."""
    parser = _parser("drafter eval", "Measure the acceptance of a drafter for its target.")
    add = parser.add_argument
    add(
        "drafter",
        metavar="DRAFTER",
        help="drafter name or directory, as for speculation.drafter of train",
    )
    add(
        "--target",
        metavar="MODEL",
        help="target model (default: the run of the drafter, else tiny-reasoner)",
    )
    add(
        "--prompts",
        metavar="SOURCE",
        help="prompts, as for data.source of train (default: held-out ones)",
    )
    add("--n", metavar="N", type=int, default=32, help="number of prompts (default 32)")
    add(
        "--max-tokens",
        metavar="N",
        type=int,
        default=1024,
        help="longest completion, tokens (default 1024)",
    )
    add(
        "--temperatures",
        metavar="X,X",
        default="0,0.6,1",
        help="sampling temperatures (default 0,0.6,1)",
    )
    add("--depth", metavar="N", type=int, default=6, help="depth of chains and trees (default 6)")
    add("--width", metavar="N", type=int, default=2, help="children per node of trees (default 2)")
    add("--size", metavar="N", type=int, default=12, help="nodes per tree (default 12)")
    add("--plot", metavar="FILE", help="also write a plot, PNG (needs the extra plots)")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        help="dtype of the target (default: as stored)",
    )
    add("--seed", metavar="N", type=int, default=0, help="seed of generated prompts (default 0)")
    add("--threads", metavar="N", type=int, default=1, help="number of compute threads (default 1)")
    add("--json", action="store_true", help="print only the JSON line")
    return parser


def drafter_export_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail drafter export`."""
    parser = _parser(
        "drafter export",
        "Write a drafter in the layout of vLLM, SGLang or speculators, with a model card.",
    )
    add = parser.add_argument
    add(
        "drafter",
        metavar="DRAFTER",
        help="drafter name or directory, as for speculation.drafter of train",
    )
    add(
        "--to",
        required=True,
        choices=("vllm", "sglang", "speculators", "hf"),
        help="layout to write",
    )
    add("--out", metavar="DIR", required=True, help="directory to create")
    add(
        "--target",
        metavar="MODEL",
        help="target model (default: the run of the drafter, else tiny-reasoner)",
    )
    add(
        "--base-model", metavar="NAME", help="name of the target on the model card (default: MODEL)"
    )
    add("--license", metavar="ID", help="license id of the Hugging Face hub (default: none)")
    add(
        "--export-dtype",
        choices=("float32", "bfloat16"),
        help="dtype of the written tensors (default: as stored)",
    )
    add(
        "--no-measure", action="store_true", help="do not measure the acceptance for the model card"
    )
    add(
        "--prompts",
        metavar="SOURCE",
        help="prompts, as for data.source of train (default: held-out ones)",
    )
    add("--n", metavar="N", type=int, default=16, help="number of prompts (default 16)")
    add(
        "--max-tokens",
        metavar="N",
        type=int,
        default=512,
        help="longest completion, tokens (default 512)",
    )
    add(
        "--temperatures",
        metavar="X,X",
        default="0,0.6,1",
        help="sampling temperatures (default 0,0.6,1)",
    )
    add(
        "--depth", metavar="N", type=int, default=4, help="depth of the measured chains (default 4)"
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        help="dtype of the target (default: as stored)",
    )
    add("--seed", metavar="N", type=int, default=0, help="seed of generated prompts (default 0)")
    add("--threads", metavar="N", type=int, default=1, help="number of compute threads (default 1)")
    return parser


def drafter_import_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail drafter import`."""
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
    add(
        "--target",
        metavar="MODEL",
        default="tiny-reasoner",
        help="target model (default tiny-reasoner)",
    )
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
        help="attention window, tokens; 0: unbounded (default: as stored)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        help="dtype of the target (default: as stored)",
    )
    add("--threads", metavar="N", type=int, default=1, help="number of compute threads (default 1)")
    return parser


def generate_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail generate`."""
    parser = _parser(
        "generate", "Generate completions of a prompt. A single completion is streamed."
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="directory of a model, checkpoint or run, or tiny-reasoner")
    add("--prompt", metavar="TEXT", help="prompt (default: standard input)")
    add("--n", metavar="N", type=int, default=1, help="number of completions (default 1)")
    add(
        "--max-tokens",
        metavar="N",
        type=int,
        default=512,
        help="longest completion, tokens (default 512)",
    )
    add(
        "--temperature",
        metavar="X",
        type=float,
        default=1.0,
        help="sampling temperature; 0: greedy (default 1)",
    )
    add(
        "--top-k",
        metavar="N",
        type=int,
        default=0,
        help="sample from the N most likely tokens; 0: all (default)",
    )
    add(
        "--top-p",
        metavar="X",
        type=float,
        default=1.0,
        help="sample from the most likely tokens of total probability X (default 1)",
    )
    add(
        "--min-p",
        metavar="X",
        type=float,
        default=0.0,
        help="smallest probability relative to the most likely token (default 0)",
    )
    add("--stop", metavar="TEXT", action="append", default=[], help="stop string; may be repeated")
    add("--seed", metavar="N", type=int, default=0, help="seed of the sampling noise (default 0)")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        help="dtype of weights and KV cache (default: as stored)",
    )
    add("--device", default="auto", help="device: auto, cpu, cuda or cuda:N (default auto)")
    add(
        "--threads",
        metavar="N",
        type=int,
        default=0,
        help="number of compute threads; 0: all cores (default)",
    )
    add(
        "--batch-invariant",
        action="store_true",
        help="same bits in any batch on a GPU, too, as rollout.batch_invariant",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", action="store_true", help="apply the chat template; fail if there is none"
    )
    form.add_argument(
        "--raw",
        action="store_true",
        help="do not apply the chat template (default: apply it if there is one)",
    )
    add(
        "--drafter",
        metavar="NAME",
        default="auto",
        help="drafter, as for speculation.drafter of train (default auto)",
    )
    add(
        "--show-drafts",
        choices=("auto", "always"),
        nargs="?",
        const="auto",
        help="colour drafted text; auto (the default value): on a terminal only",
    )
    add("--json", action="store_true", help="print one JSON object per completion")
    return parser


def serve_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail serve`."""
    from longtail.serve import options

    parser = _parser(
        "serve",
        "Serve a model with the OpenAI HTTP API, with speculative decoding.",
    )
    options.add_arguments(parser)
    return parser


def bench_parser(name: str) -> argparse.ArgumentParser:
    """Build the parser of `longtail bench`."""
    parser = _parser(f"bench {name}", BENCHES[name].summary)
    BENCHES[name].add_arguments(parser)
    return parser


def report_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail report`."""
    parser = _parser(
        "report",
        "Write report.html and rollout.png about a run: summary, rollout, decisions, costs.",
    )
    parser.add_argument("run", metavar="RUN_DIR", help="run directory of longtail train")
    parser.add_argument(
        "--step", metavar="N", type=int, help="training step of the rollout to show (default: last)"
    )
    return parser


def doctor_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail doctor`."""
    parser = _parser(
        "doctor", "Check packages, hardware and kernels, and print a remedy for what is missing."
    )
    parser.add_argument(
        "--run",
        metavar="DIR",
        help="run with the cost model (default: newest in runs/) and open sockets to show",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    return parser
