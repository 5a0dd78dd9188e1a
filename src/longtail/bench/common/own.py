"""A user's own model and prompts in a benchmark: `--model MODEL --prompts SOURCE`."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longtail.assembly.drafters import Target, open_drafter, read_drafter
from longtail.assembly.engine import open_model
from longtail.assembly.models import model_directory
from longtail.bench.common.process import Log
from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.history import HistoryDrafter
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.rl.data.prompts import Encoder, make_prompts
from longtail.rl.data.sources import load_rows
from longtail.speculation.drafter import Drafter

_MAX_TOKENS = 512
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel:
    """A model with prompts as its chat template formats them."""

    target: Target
    prompts: Sequence[tuple[int, ...]]
    max_tokens: int
    """Longest completion in tokens: 512, or half of the model's positions."""


def open_own(name: str, source: str, dtype: str, num_prompts: int, log: Log) -> OwnModel:
    """Read a model as `model.path` of train, and prompts as its `data.source`.

    Raises ConfigError, which names --model or --prompts, if one cannot be read.
    """
    directory = model_directory(name, log, field="--model")
    tokenizer = load_tokenizer(directory)
    target = open_model(name, directory, tokenizer, dtype)
    max_tokens = min(_MAX_TOKENS, target.model.config.max_positions // 2)
    render = tokenizer.render if tokenizer.has_chat_template else None
    found = make_prompts(
        load_rows(source, num_prompts, _SEED, field="--prompts"),
        source=source,
        encoder=Encoder(encode=tokenizer.encode, render=render),
        max_prompt_len=target.model.config.max_positions - max_tokens,
        drop_long=True,
    )
    prompts = [each.tokens for each in found.prompts[:num_prompts]]
    return OwnModel(target=target, prompts=prompts, max_tokens=max_tokens)


def drafter_maker(name: str, target: Target, log: Log) -> Callable[[], Drafter]:
    """Return a function that makes a new drafter, as `speculation.drafter` names it.

    Raises ConfigError for a drafter that does not fit the target.
    """
    if name == "history":
        return HistoryDrafter
    loaded = read_drafter(name, target, log, target.model.dtype, field="--drafter")
    if loaded is None:
        return lambda: open_drafter(name, target, log)
    return lambda: EagleDrafter(
        copy.deepcopy(loaded.layer), target.model, draft_ids=loaded.draft_ids, head=loaded.head
    )
