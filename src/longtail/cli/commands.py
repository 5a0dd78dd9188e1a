"""Commands of the command line, their options and the functions that run them; imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from longtail.config import command_options, files
from longtail.config.arguments import Parser, read
from longtail.config.drafter import DrafterTrainConfig
from longtail.config.rl import RunConfig
from longtail.config.sft import SftConfig


def imported(program: str) -> Any:
    """Import a function below `longtail`. Example: imported("loop.train")"""
    module, _, name = program.rpartition(".")
    return getattr(import_module(f"longtail.{module}"), name)


@dataclass(frozen=True, slots=True)
class Command:
    """A command whose options are a dataclass."""

    summary: str
    options: type
    program: str
    """Function that takes the options, below `longtail`."""

    def parser(self, name: str) -> Parser:
        """Return the parser of the options."""
        parser = Parser(name, self.summary)
        parser.declare(self.options)
        return parser

    def run(self, name: str, words: Sequence[str]) -> int:
        """Read the options, then import and run the program."""
        chosen: Any = read(self.options, self.parser(name), words)
        return imported(self.program)(chosen) or 0


@dataclass(frozen=True, slots=True)
class ConfiguredCommand:
    """A command whose options are the sections of a configuration."""

    summary: str
    config: type[BaseModel]
    program: str

    def parser(self, name: str) -> Parser:
        """Return the parser of a run file, and of every field of the configuration."""
        usage = f"longtail {name} [RUN] [--dry-run] [--section.key VALUE ...]"
        parser = Parser(name, self.summary, usage=usage)
        known = ", ".join(files.recipes(name))
        run = f"TOML file, key = VALUE under [section]{f', or recipe ({known})' if known else ''}"
        parser.add_argument("file", metavar="RUN", nargs="?", help=f"{run}; default: no file")
        text = "print the resolved configuration as TOML, with an estimate of memory, and exit"
        parser.add_argument("--dry-run", action="store_true", help=text)
        parser.declare(self.config)
        return parser

    def run(self, name: str, words: Sequence[str]) -> int:
        """Resolve the configuration, then print it or run the program with it."""
        given = self.parser(name).values(words)
        file, is_dry = given.pop("file", None), given.pop("dry_run", False)
        path = files.locate(file, name) if file else None
        config: Any = files.merged(self.config, path, given)
        if not is_dry:
            return imported(self.program)(config) or 0
        if isinstance(config, DrafterTrainConfig):
            imported("programs.drafter_train.check_settings")(config)
        config = imported("assembly.precision.decided")(config)
        lines = [files.render(config)]
        if isinstance(config, RunConfig):
            imported("assembly.drafters.check_names")(config.speculation.drafter)
            with imported("rl.grading.pool.GraderPool")(config.reward) as grader:
                grader.wait_ready()
            report = imported("assembly.memory_bound.report")(config)
            lines += [f"# {row}" for row in report.splitlines()]
        print("\n".join(lines))
        return 0


COMMANDS: Mapping[str, Command | ConfiguredCommand] = MappingProxyType(
    {
        "train": ConfiguredCommand(
            "Train a policy with reinforcement learning, or resume a stopped run.",
            RunConfig,
            "loop.train",
        ),
        "sft": ConfiguredCommand(
            "Fine-tune a model on prompts with completions. The loss covers the completions only.",
            SftConfig,
            "programs.sft.run",
        ),
        "drafter train": ConfiguredCommand(
            "Train a drafter on completions of its target, generated first or read from files.",
            DrafterTrainConfig,
            "programs.drafter_train.run",
        ),
        "drafter eval": Command(
            "Measure the acceptance of a drafter for its target.",
            command_options.EvalOptions,
            "programs.drafter_eval.run",
        ),
        "drafter export": Command(
            "Write a drafter in the Hugging Face layout of EAGLE that vLLM reads.",
            command_options.ExportOptions,
            "programs.drafter_convert.run_export",
        ),
        "drafter import": Command(
            "Convert a published EAGLE or EAGLE-3 drafter into a drafter directory.",
            command_options.ImportOptions,
            "programs.drafter_convert.run_import",
        ),
        "merge": Command(
            "Write the whole model of a run that trained adapters (learner.lora).",
            command_options.MergeOptions,
            "programs.merge.run",
        ),
        "generate": Command(
            "Generate completions of a prompt. A single completion is streamed.",
            command_options.GenerateOptions,
            "cli.generate.run",
        ),
        "serve": Command(
            "Serve a model with the OpenAI HTTP API, with speculative decoding.",
            command_options.ServeOptions,
            "serve.run",
        ),
        "bench e2e": Command(
            "Compare a training run as it is configured with plain decoding.",
            command_options.E2eBenchOptions,
            "bench.e2e.run",
        ),
        "report": Command(
            "Write report.html into a run directory: the page of longtail view as one file.",
            command_options.ReportOptions,
            "view.report.run",
        ),
        "view": Command(
            "Show runs on a live web page, while they continue or afterwards.",
            command_options.ViewOptions,
            "view.command.run",
        ),
        "doctor": Command(
            "Check packages, hardware and kernels; print remedies.",
            command_options.DoctorOptions,
            "cli.doctor.run",
        ),
    }
)
"""All commands, by their words after `longtail`."""
