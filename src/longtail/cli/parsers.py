"""The options of every verb, as `cli` reads them and docs/cli.md prints them; imports no torch."""

import argparse
from collections.abc import Callable
from functools import partial

from longtail.bench.registry import BENCHES

_WIDTH = 96

def parsers() -> dict[str, Callable[[], argparse.ArgumentParser]]:
    """Return what builds the parser of each command, by its name after `longtail`."""
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
    """The same help on every terminal, so that docs/cli.md can hold it."""

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
        "Train a policy with reinforcement learning; go on where an earlier start was stopped.",
        usage="longtail train [RUN] [--dry-run] [--section.key VALUE ...]",
        epilog=configfile.describe(config.RunConfig),
    )
    recipes = ", ".join(configfile.recipes())
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help=f"TOML file or recipe ({recipes}); none: all defaults"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved configuration and the memory it will take, as TOML",
    )
    return parser


def sft_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail sft`."""
    from longtail.config import files as configfile
    from longtail.config import sft as sft_config

    parser = _parser(
        "sft",
        "Fine-tune a model on prompts with completions; the loss is on completions alone.",
        usage="longtail sft [RUN] [--dry-run] [--section.key VALUE ...]",
        epilog=configfile.describe(sft_config.SftConfig),
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="TOML file; none: all defaults")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration, as TOML"
    )
    return parser


def drafter_train_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail drafter train`."""
    from longtail.config import drafter as drafter_config
    from longtail.config import files as configfile

    parser = _parser(
        "drafter train",
        "Train an EAGLE drafter on texts that its target writes first, or on given ones.",
        usage="longtail drafter train [RUN] [--dry-run] [--section.key VALUE ...]",
        epilog=configfile.describe(drafter_config.DrafterTrainConfig),
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="TOML file; none: all defaults")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration, as TOML"
    )
    return parser


def drafter_eval_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail drafter eval`."""
    parser = _parser("drafter eval", "Measure how well a drafter drafts for its target.")
    add = parser.add_argument
    add("drafter", metavar="DRAFTER", help="a drafter, as speculation.drafter of train names it")
    add("--target", metavar="MODEL", help="(default: the drafter's run, else tiny-reasoner)")
    add("--prompts", metavar="SOURCE", help="as data.source of train; default: the held-out ones")
    add("--n", metavar="N", type=int, default=32, help="prompts (default 32)")
    add("--max-tokens", metavar="N", type=int, default=1024, help="(default 1024)")
    add("--temperatures", metavar="X,X", default="0,0.6,1", help="(default 0,0.6,1)")
    add("--depth", metavar="N", type=int, default=6, help="of chain and tree (default 6)")
    add("--width", metavar="N", type=int, default=2, help="of the tree (default 2)")
    add("--size", metavar="N", type=int, default=12, help="of the tree (default 12)")
    add("--plot", metavar="FILE", help="also draw a picture, a PNG (extra: plots)")
    add("--dtype", choices=("float32", "bfloat16", "float64"), help="(default: as stored)")
    add("--seed", metavar="N", type=int, default=0, help="of generated prompts (default 0)")
    add("--threads", metavar="N", type=int, default=1, help="compute threads (default 1)")
    add("--json", action="store_true", help="print the JSON line only")
    return parser


def drafter_export_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail drafter export`."""
    parser = _parser(
        "drafter export",
        "Write a drafter as vLLM, SGLang or speculators load it, checked, with a model card.",
    )
    add = parser.add_argument
    add("drafter", metavar="DRAFTER", help="a drafter, as speculation.drafter of train names it")
    add("--to", required=True, choices=("vllm", "sglang", "speculators", "hf"), help="the layout")
    add("--out", metavar="DIR", required=True, help="a directory that does not exist yet")
    add("--target", metavar="MODEL", help="(default: the drafter's run, else tiny-reasoner)")
    add("--base-model", metavar="NAME", help="the card's name of the target (default: MODEL)")
    add("--license", metavar="ID", help="as the hub names it (default: not stated)")
    add(
        "--export-dtype",
        choices=("float32", "bfloat16"),
        help="of the tensors written (default: as stored)",
    )
    add("--no-measure", action="store_true", help="leave the card's figures out")
    add("--prompts", metavar="SOURCE", help="as data.source of train; default: the held-out ones")
    add("--n", metavar="N", type=int, default=16, help="prompts (default 16)")
    add("--max-tokens", metavar="N", type=int, default=512, help="(default 512)")
    add("--temperatures", metavar="X,X", default="0,0.6,1", help="(default 0,0.6,1)")
    add("--depth", metavar="N", type=int, default=4, help="of the chains (default 4)")
    add("--dtype", choices=("float32", "bfloat16", "float64"), help="of the target")
    add("--seed", metavar="N", type=int, default=0, help="of generated prompts (default 0)")
    add("--threads", metavar="N", type=int, default=1, help="compute threads (default 1)")
    return parser


def drafter_import_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail drafter import`."""
    parser = _parser(
        "drafter import", "Make a drafter directory of a published EAGLE or EAGLE-3 drafter."
    )
    add = parser.add_argument
    add("directory", metavar="DIR", help="config.json and safetensors, downloaded")
    add("--out", metavar="DIR", required=True, help="a directory that does not exist yet")
    add("--target", metavar="MODEL", default="tiny-reasoner", help="(default tiny-reasoner)")
    add(
        "--layer-ids",
        choices=("auto", "input", "output"),
        default="auto",
        help="how eagle_aux_hidden_state_layer_ids count: input of a layer (vLLM), output (SGLang)",
    )
    add("--window", metavar="N", type=int, help="pairs seen; 0: all (default: as written, else 0)")
    add("--dtype", choices=("float32", "bfloat16", "float64"), help="of the target")
    add("--threads", metavar="N", type=int, default=1, help="compute threads (default 1)")
    return parser


def generate_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail generate`."""
    parser = _parser("generate", "Write completions of a prompt; a single one is streamed.")
    add = parser.add_argument
    add("model", metavar="MODEL", help="model, checkpoint or run directory, or tiny-reasoner")
    add("--prompt", metavar="TEXT", help="what to complete; default: standard input")
    add("--n", metavar="N", type=int, default=1, help="completions to write (default 1)")
    add("--max-tokens", metavar="N", type=int, default=512, help="longest completion (default 512)")
    add("--temperature", metavar="X", type=float, default=1.0, help="0 is greedy (default 1)")
    add("--top-k", metavar="N", type=int, default=0, help="likeliest tokens kept; 0: all (default)")
    add("--top-p", metavar="X", type=float, default=1.0, help="probability kept (default 1: all)")
    add("--min-p", metavar="X", type=float, default=0.0, help="share of the likeliest (default 0)")
    add("--stop", metavar="TEXT", action="append", default=[], help="end there; may be repeated")
    add("--seed", metavar="N", type=int, default=0, help="of the sampling noise (default 0)")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        help="of weights and KV cache (default: as stored)",
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto)")
    add("--threads", metavar="N", type=int, default=0, help="compute threads; 0: every core")
    add("--batch-invariant", action="store_true", help="as rollout.batch_invariant of train")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="apply the chat template, or fail")
    form.add_argument(
        "--raw", action="store_true", help="no chat template (default: where there is one)"
    )
    add("--drafter", metavar="NAME", default="auto", help="as speculation.drafter (default auto)")
    add(
        "--show-drafts",
        choices=("auto", "always"),
        nargs="?",
        const="auto",
        help="colour what drafts foretold; auto, if no value is given: on a terminal only",
    )
    add("--json", action="store_true", help="one JSON object a completion")
    return parser


def serve_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail serve`."""
    from longtail.serve import options as setting

    parser = _parser(
        "serve",
        "Answer OpenAI's protocol over HTTP; drafts speed it up and change no text.",
    )
    setting.add_arguments(parser)
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
        "Write rollout.png and report.html into a run's directory: card, rollout, switches, costs.",
    )
    parser.add_argument("run", metavar="RUN_DIR", help="directory of a run that speculated")
    parser.add_argument(
        "--step", metavar="N", type=int, help="training step whose rollout is shown (default: last)"
    )
    return parser


def doctor_parser() -> argparse.ArgumentParser:
    """Build the parser of `longtail doctor`."""
    parser = _parser(
        "doctor", "Say what this machine offers, what is missing and the command to get it."
    )
    parser.add_argument(
        "--run",
        metavar="DIR",
        help="run whose cost model (default: newest under runs/) and open sockets are shown",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    return parser
