"""Commands of the command line, their options and the functions that run them; imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from longtail.bench.options import E2eBenchOptions
from longtail.cli import options
from longtail.config import files
from longtail.config.drafter import DrafterTrainConfig
from longtail.config.options import Arguments, Parser, arguments_of, read
from longtail.config.rl import RunConfig
from longtail.config.sft import SftConfig
from longtail.serve.options import ServeOptions
from longtail.view.command import ViewOptions


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

    def arguments(self, name: str) -> Arguments:
        """Return the arguments, by their name."""
        return arguments_of(name, self.summary, self.options)

    def run(self, name: str, words: Sequence[str]) -> int:
        """Read the options, then import and run the program."""
        chosen: Any = read(self.options, self.arguments(name), words)
        return imported(self.program)(chosen) or 0


@dataclass(frozen=True, slots=True)
class ConfiguredCommand:
    """A command whose options are the sections of a configuration."""

    summary: str
    config: type[BaseModel]
    program: str

    def arguments(self, name: str) -> Arguments:
        """Return the arguments: a run file, and every field of the configuration."""
        usage = f"longtail {name} [RUN] [--dry-run] [--section.key VALUE ...]"
        parser = Parser(name, self.summary, usage=usage)
        known = ", ".join(files.recipes(name))
        run = f"TOML file, key = VALUE under [section]{f', or recipe ({known})' if known else ''}"
        parser.add_argument("file", metavar="RUN", nargs="?", help=f"{run}; default: no file")
        text = "print the resolved configuration as TOML, with an estimate of memory, and exit"
        parser.add_argument("--dry-run", action="store_true", help=text)
        return Arguments(parser, self.config, has_sections=True)

    def run(self, name: str, words: Sequence[str]) -> int:
        """Resolve the configuration, then print it or run the program with it."""
        parsed, given = self.arguments(name).parse(words)
        path = files.locate(parsed.file, name) if parsed.file else None
        config: Any = files.merged(self.config, path, given)
        if not parsed.dry_run:
            return imported(self.program)(config) or 0
        if isinstance(config, DrafterTrainConfig):
            imported("programs.drafter_train.check_settings")(config)
        config = imported("assembly.precision.decided")(config)
        print(files.render(config))
        if isinstance(config, RunConfig):
            report = imported("assembly.memory.report")(config)
            print("".join(f"# {row}\n" for row in report.splitlines()))
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
            options.EvalOptions,
            "programs.drafter_eval.run",
        ),
        "drafter export": Command(
            "Write a drafter in the Hugging Face layout of EAGLE that vLLM reads.",
            options.ExportOptions,
            "programs.drafter_convert.run_export",
        ),
        "drafter import": Command(
            "Convert a published EAGLE or EAGLE-3 drafter into a drafter directory.",
            options.ImportOptions,
            "programs.drafter_convert.run_import",
        ),
        "merge": Command(
            "Write the whole model of a run that trained adapters (learner.lora).",
            options.MergeOptions,
            "programs.merge.run",
        ),
        "generate": Command(
            "Generate completions of a prompt. A single completion is streamed.",
            options.GenerateOptions,
            "cli.generate.run",
        ),
        "serve": Command(
            "Serve a model with the OpenAI HTTP API, with speculative decoding.",
            ServeOptions,
            "serve.run",
        ),
        "bench e2e": Command(
            "Compare a training run without drafting, with it, and with work for idle workers.",
            E2eBenchOptions,
            "bench.e2e.run",
        ),
        "report": Command(
            "Write report.html into a run directory: the page of longtail view as one file.",
            options.ReportOptions,
            "view.report.run",
        ),
        "view": Command(
            "Show runs on a live web page, while they continue or afterwards.",
            ViewOptions,
            "view.command.run",
        ),
        "doctor": Command(
            "Check packages, hardware and kernels; print remedies.",
            options.DoctorOptions,
            "cli.doctor.run",
        ),
    }
)
"""All commands, by their words after `longtail`."""
