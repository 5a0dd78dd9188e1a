"""Target and prompts of `longtail drafter eval` and `longtail drafter export`.

Both have defaults from the run that the drafter is from: a run of `longtail train` has a policy and
prompts of its own, and one of `longtail drafter train` names its target and keeps its texts.
"""

import argparse
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from longtail.assembly.drafters import Target, check_names, open_drafter
from longtail.assembly.engine import open_model
from longtail.assembly.models import TINY_REASONER, model_directory
from longtail.assembly.prompts import load_prompts
from longtail.config import files as configfile
from longtail.config.drafter import DrafterTrainConfig
from longtail.config.rl import RunConfig
from longtail.drafter.formats import checkpoint
from longtail.drafter.training.texts import kept_texts
from longtail.errors import ConfigError
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.programs.drafter_data import TEXTS_FILE, given_texts
from longtail.rl.data.examples import Example
from longtail.rl.data.prompts import Encoder, make_prompts
from longtail.rl.data.sources import load_rows
from longtail.run.checkpoint import CONFIG_FILE
from longtail.run.drafter_store import run_drafters
from longtail.system.device import to_stderr

_PARENTS = 3
"""Number of folders above a drafter among which its run is."""
_SHORTEST = 16
"""Number of tokens from a text without a prompt that serve as one."""
_SAMPLES = (
    "How many minutes are there in three and a half hours? Think step by step.",
    "List the first ten prime numbers and add them up.",
    "Write one sentence about the sea, and translate it into French.",
    "def fibonacci(n):",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPrompts:
    """Prompts on which a drafter is measured.

    Example: EvalPrompts(tokens=((1, 2, 3),), source="runs/quickstart")
    """

    tokens: tuple[tuple[int, ...], ...]
    source: str
    """Source or run that they are from."""


def open_target(args: argparse.Namespace) -> Target:
    """Open the target and, as a check, the drafter; raise ConfigError if one fails.

    Reads target, drafter, n, max_tokens and dtype. A missing target is set to that of the drafter's
    run.
    """
    for option, value in (("--n", args.n), ("--max-tokens", args.max_tokens)):
        if value < 1:
            raise ConfigError(f"{option} = {value}: it must be at least 1")
    check_names(args.drafter, field="DRAFTER")
    args.target = args.target or _default_target(args.drafter)
    directory = model_directory(args.target, field="--target")
    target = open_model(args.target, directory, load_tokenizer(directory), args.dtype)
    open_drafter(args.drafter, target, to_stderr)
    return target


def find_prompts(args: argparse.Namespace, target: Target) -> EvalPrompts | None:
    """Return the prompts of --prompts, else of the run of drafter or target; None if none has any.

    Reads target, drafter, prompts, n, max_tokens and seed.
    """
    room = target.model.config.max_positions - args.max_tokens
    if args.prompts:
        return _of_source(args, target.tokenizer, args.prompts, room)
    for run in (_run_of(args.drafter), _run_of(args.target)):
        found = None if run is None else _of_run(run, target.tokenizer)
        if run is not None and found:
            fitting = [tokens for tokens in found if len(tokens) <= room]
            return _checked(fitting[: args.n], str(run), room)
    if args.target == TINY_REASONER:
        return _of_source(args, target.tokenizer, f"{TINY_REASONER}:heldout", room)
    return None


def require_prompts(args: argparse.Namespace, target: Target) -> EvalPrompts:
    """Return the prompts of `find_prompts`; raise ConfigError if there are none."""
    found = find_prompts(args, target)
    if found is None:
        raise ConfigError("--prompts is needed: a source of prompts, as data.source of train")
    return found


def sample_prompts(target: Target) -> tuple[tuple[int, ...], ...]:
    """Return a few built-in prompts in the target's chat format, for checks of files."""
    tokenizer = target.tokenizer
    texts = [[{"role": "user", "content": text}] for text in _SAMPLES]
    found = map(tokenizer.chat, texts) if tokenizer.has_chat_template else ()
    return tuple(found) or tuple(map(tokenizer.encode, _SAMPLES))


def _default_target(drafter: str) -> str:
    """Return the run that a drafter is from, the target that it names, or the embedded model."""
    place = run_drafters(Path(drafter))
    if place is not None:
        return str(place.parent)
    run = _run_of(drafter)
    if run is not None:
        own = _configuration(run)
        return own.target.path if isinstance(own, DrafterTrainConfig) else str(run)
    if checkpoint.is_drafter(Path(drafter)):
        return checkpoint.target_name(Path(drafter))
    return TINY_REASONER


def _run_of(name: str) -> Path | None:
    """Return the run directory at or above a path."""
    path = Path(name)
    places = (path, *path.absolute().parents[:_PARENTS]) if path.is_dir() else ()
    return next((each for each in places if (each / CONFIG_FILE).is_file()), None)


def _configuration(run: Path) -> RunConfig | DrafterTrainConfig | None:
    """Read the configuration of a run; None for a run of another program."""
    file = run / CONFIG_FILE
    try:
        sections = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}); give --target and --prompts"
        ) from error
    if "target" in sections:
        return configfile.resolve(DrafterTrainConfig, file, [])
    return configfile.resolve(RunConfig, file, []) if "rollout" in sections else None


def _of_run(run: Path, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the prompts of a run, held-out ones if it has some."""
    own = _configuration(run)
    if isinstance(own, RunConfig):
        prompts = load_prompts(own, tokenizer, lambda rows: {})
        chosen = prompts.heldout.prompts or prompts.train.prompts
        return [prompt.tokens for prompt in chosen]
    if own is None:
        return []
    texts = _texts_of(run, own, tokenizer)
    lengths = (text.prompt_len if text.prompt_len > 1 else _SHORTEST for text in texts)
    cut = (text.tokens[:length] for text, length in zip(texts, lengths, strict=True))
    return list(dict.fromkeys(cut))


def _texts_of(run: Path, own: DrafterTrainConfig, tokenizer: Tokenizer) -> Sequence[Example]:
    """Return the texts that a drafter was trained on, held-out ones first."""
    if own.data.completions == "given":
        corpus = given_texts(own, tokenizer)
        return corpus.heldout or corpus.training
    kept = run / TEXTS_FILE
    return kept_texts(kept)[1][::-1] if kept.is_file() else ()


def _of_source(
    args: argparse.Namespace, tokenizer: Tokenizer, source: str, room: int
) -> EvalPrompts:
    render = tokenizer.render if tokenizer.has_chat_template else None
    prompts = make_prompts(
        load_rows(source, args.n, args.seed, field="--prompts"),
        source=source,
        encoder=Encoder(encode=tokenizer.encode, render=render),
        max_prompt_len=room,
        drop_long=True,
    )
    return _checked([prompt.tokens for prompt in prompts.prompts[: args.n]], source, room)


def _checked(tokens: Iterable[tuple[int, ...]], source: str, room: int) -> EvalPrompts:
    found = tuple(tokens)
    if not found:
        raise ConfigError(
            f"{source}: none of its prompts has at most {room} tokens; lower --max-tokens"
        )
    return EvalPrompts(tokens=found, source=source)
