"""A model with prompts and a drafter, for benchmarks of generation."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from longtail.assembly.drafters import Target, open_drafter, read_drafter
from longtail.assembly.engine import model_directory, open_model
from longtail.bench.common.timing import Log
from longtail.drafter.architecture import make_drafter
from longtail.drafter.history import HistoryDrafter
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.rl.data.prompts import Encoder, make_prompts
from longtail.rl.data.sources import load_rows
from longtail.sampling import noise_key
from longtail.speculation.drafter import Drafter
from longtail.types import Request, SamplingParams

_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with prompts as its chat template formats them."""

    target: Target
    prompts: Sequence[tuple[int, ...]]
    sampling: SamplingParams

    def requests(self, count: int, turn: int = 0) -> list[Request]:
        """Return requests, prompt after prompt; their noise keys follow from turn and position."""
        return [
            Request(
                request_id=str(index),
                prompt_tokens=self.prompts[index % len(self.prompts)],
                noise_key=noise_key(turn, "bench", index),
                sampling=self.sampling,
            )
            for index in range(count)
        ]


def open_subject(
    model: str, source: str, *, dtype: str, num_prompts: int, sampling: SamplingParams, log: Log
) -> Subject:
    """Read a model as `model.path` of train, and prompts as its `data.source`.

    `sampling` is extended by the model's end-of-text tokens. Raises ConfigError or DataError, which
    names --model or --prompts, if one cannot be read.
    """
    directory = model_directory(model, log, field="--model")
    tokenizer = load_tokenizer(directory)
    target = open_model(model, directory, tokenizer, dtype)
    found = make_prompts(
        load_rows(source, num_prompts, _SEED, field="--prompts"),
        source=source,
        encoder=Encoder.of(tokenizer),
        max_prompt_len=target.model.config.max_positions - sampling.max_tokens,
        drop_long=True,
    )
    return Subject(
        target=target,
        prompts=[each.tokens for each in found.prompts[:num_prompts]],
        sampling=replace(sampling, stop_token_ids=tokenizer.eos_ids),
    )


def drafter_maker(name: str, target: Target, log: Log) -> Callable[[], Drafter]:
    """Return a function that makes a new drafter, as `speculation.drafter` names it.

    Raises ConfigError, which names --drafter, for a drafter that does not fit the target.
    """
    if name == "history":
        return HistoryDrafter
    loaded = read_drafter(name, target, log, target.model.dtype, field="--drafter")
    if loaded is None:
        return lambda: open_drafter(name, target, log)
    return lambda: make_drafter(
        copy.deepcopy(loaded.layer), target.model, draft_ids=loaded.draft_ids, head=loaded.head
    )
