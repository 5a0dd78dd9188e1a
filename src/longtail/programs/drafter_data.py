"""From a configuration to the texts that a drafter learns: read, or written by the target first.

Texts that the target wrote are kept in the run directory, so that a resumed run does not write them
again. What is done with texts is `drafter_train`'s business.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from longtail.build.trainer import TINY_REASONER
from longtail.config.drafter import DrafterTrainConfig
from longtail.drafter.training.texts import read_texts, save_texts, write_texts
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.report import StepReport
from longtail.errors import ConfigError, DataError
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.transformer import Transformer
from longtail.rl.data.examples import Example, example_of, make_examples
from longtail.rl.data.prompts import Encoder, make_prompts
from longtail.rl.data.sources import Row, load_rows
from longtail.system.device import compute_threads, rollout_threads
from longtail.types import SamplingParams

_STEP_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What is learned, and what is only measured."""

    learned: tuple[Example, ...]
    heldout: tuple[Example, ...]
    num_dropped: int
    """Rows left out: prompts over the limit, texts too short to draft in."""


def given_texts(config: DrafterTrainConfig, tokenizer: Tokenizer) -> Corpus:
    """Read texts as they are."""
    data = config.data
    texts = _file_texts(config, tokenizer) or _row_texts(config, tokenizer)
    texts = [_cut(text, data.max_len) for text in texts[: data.size]]
    return _corpus(config, texts, min(data.heldout_size, len(texts) // 2), 0)


def generated_texts(
    config: DrafterTrainConfig,
    tokenizer: Tokenizer,
    load_target: Callable[[], Transformer],
    kept: Path,
    on_step: Callable[[StepReport], None],
    announce: Callable[[int], None],
) -> Corpus:
    """Let the target write completions, or read those it wrote before into `kept`."""
    data = config.data
    rows, num_heldout = _prompt_rows(config)
    prompts = make_prompts(
        rows,
        source=data.source,
        encoder=_encoder(tokenizer),
        max_prompt_len=data.max_prompt_len,
        drop_long=True,
        prompt_column=data.prompt_column,
    )
    tokens = [prompt.tokens for prompt in prompts.prompts]
    num_heldout = min(num_heldout, len(tokens) // 2) * data.samples
    content = [config.target.model_dump(), data.model_dump(), config.run.seed, tokens]
    origin = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    texts = read_texts(kept, origin)
    if texts is None:
        announce(len(tokens) * data.samples)
        texts = _write(config, tokenizer, load_target(), tokens, on_step)
        save_texts(kept, texts, origin)
    return _corpus(config, texts, num_heldout, prompts.num_dropped)


def _corpus(
    config: DrafterTrainConfig, texts: Sequence[Example], num_heldout: int, num_dropped: int
) -> Corpus:
    """Hold the last texts out; leave out those in which no draft reaches every depth."""
    shortest = config.drafter.num_unrolled + 2
    cut = len(texts) - num_heldout
    parts = [
        tuple(text for text in part if len(text.tokens) >= shortest and _completes(text))
        for part in (texts[:cut], texts[cut:])
    ]
    if not parts[0]:
        raise DataError(
            f"data.source = {config.data.source!r}: none of its texts has {shortest} tokens with a "
            f"completion among them, which drafter.unroll_steps = {config.drafter.num_unrolled} "
            "needs; give longer texts"
        )
    short = len(texts) - sum(map(len, parts))
    return Corpus(learned=parts[0], heldout=parts[1], num_dropped=num_dropped + short)


def _completes(text: Example) -> bool:
    return text.prompt_len < len(text.tokens)


def _cut(text: Example, length: int) -> Example:
    tokens = text.tokens[:length]
    return Example(tokens=tokens, prompt_len=min(text.prompt_len, len(tokens)))


def _encoder(tokenizer: Tokenizer) -> Encoder:
    return Encoder(
        encode=tokenizer.encode, render=tokenizer.render if tokenizer.has_chat_template else None
    )


def _file_texts(config: DrafterTrainConfig, tokenizer: Tokenizer) -> list[Example]:
    """Cut a .txt file into pieces of `max_len` tokens; [] for other sources."""
    source, length = config.data.source, config.data.max_len
    if not source.endswith(".txt"):
        return []
    path = Path(source).expanduser()
    try:
        tokens = tokenizer.encode(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"data.source = {source!r}: {path.absolute()} cannot be read ({error.strerror})"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"data.source = {source!r}: not UTF-8 (byte {error.start})") from error
    if not tokens:
        raise DataError(f"data.source = {source!r}: it is empty")
    pieces = (tokens[start : start + length] for start in range(0, len(tokens), length))
    return [Example(tokens=piece, prompt_len=1) for piece in pieces]


def _row_texts(config: DrafterTrainConfig, tokenizer: Tokenizer) -> list[Example]:
    """Read rows of whole texts, or of prompts with completions."""
    data, eos_ids = config.data, tokenizer.eos_ids
    if data.source == TINY_REASONER:
        raise ConfigError(
            "data.completions = 'given': the tiny reasoner's problems come without completions; "
            "set data.completions = 'generated'"
        )
    rows = load_rows(data.source, data.size, config.run.seed)[: data.size]
    if not eos_ids:
        raise ConfigError(
            f"target.path = {config.target.path!r}: its tokenizer names no end-of-text token; set "
            "eos_token in tokenizer_config.json"
        )
    if data.text_column in rows[0]:
        return [_whole(row, i, config, tokenizer) for i, row in enumerate(rows)]
    examples = make_examples(
        rows,
        source=data.source,
        encoder=_encoder(tokenizer),
        eos_id=eos_ids[0],
        max_len=sys.maxsize,
        prompt_column=data.prompt_column,
        completion_column=data.completion_column,
    )
    return [example_of(prompt) for prompt in examples.prompts]


def _whole(row: Row, index: int, config: DrafterTrainConfig, tokenizer: Tokenizer) -> Example:
    column = config.data.text_column
    text = row.get(column)
    if not isinstance(text, str) or not text:
        raise DataError(
            f"data.source = {config.data.source!r}, row {index}: {column} is {text!r:.80}, "
            "expected text"
        )
    return Example(tokens=(*tokenizer.encode(text), tokenizer.eos_ids[0]), prompt_len=1)


def _prompt_rows(config: DrafterTrainConfig) -> tuple[list[Row], int]:
    """Return rows with those held out last, and how many of them there are."""
    data, seed = config.data, config.run.seed
    if data.source != TINY_REASONER:
        return load_rows(data.source, data.size, seed)[: data.size], data.heldout_size
    rows = load_rows(TINY_REASONER, data.size - data.heldout_size, seed)
    if data.heldout_size:  # of starts that no other problem has
        rows += load_rows(f"{TINY_REASONER}:heldout", data.heldout_size, seed)
    return rows, data.heldout_size


def _write(
    config: DrafterTrainConfig,
    tokenizer: Tokenizer,
    target: Transformer,
    prompts: Sequence[tuple[int, ...]],
    on_step: Callable[[StepReport], None],
) -> list[Example]:
    data, shape = config.data, target.config
    longest = max(map(len, prompts))
    if longest + data.max_tokens > shape.max_positions:
        raise ConfigError(
            f"data.max_tokens = {data.max_tokens}: after the longest prompt, of {longest} tokens, "
            f"the target has {max(shape.max_positions - longest, 0)} of its "
            f"{shape.max_positions} positions left; lower it, or data.max_prompt_len"
        )
    limits = EngineLimits(
        max_running=data.max_running,
        max_step_tokens=_STEP_TOKENS,
        max_len=longest + data.max_tokens,
    )
    engine = RolloutEngine(target, tokenizer.decode, limits)
    sampling = SamplingParams(
        temperature=data.temperature,
        max_tokens=data.max_tokens,
        stop_token_ids=tokenizer.eos_ids,
    )
    with compute_threads(rollout_threads(shape.hidden_size)):
        return write_texts(
            lambda requests: engine.generate(requests, on_step),
            prompts,
            sampling,
            samples=data.samples,
            seed=config.run.seed,
        )
