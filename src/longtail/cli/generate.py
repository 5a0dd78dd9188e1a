"""`longtail generate`: completions of one prompt, with a model or the newest checkpoint of a run.

Completions go to standard output, speed and acceptance to standard error.
"""

import sys
from collections import Counter
from collections.abc import Sequence

from longtail.api import Engine, PromptInput, TextStream
from longtail.config.command_options import GenerateOptions
from longtail.engine.report import RolloutReport
from longtail.engine.text import Piece
from longtail.errors import ConfigError, RequestError
from longtail.system.device import set_threads
from longtail.system.files import json_line
from longtail.types import Completion, SamplingParams

_DRAFTED, _PLAIN = "\x1b[32m", "\x1b[0m"
"""Terminal codes around text that was drafted: green."""
_MOST_PROMPT = 10_000_000
"""Most characters of a prompt from standard input; no model reads as many."""


def run(args: GenerateOptions) -> int:
    """Generate as the options say."""
    if args.chat and args.raw:
        raise ConfigError("--chat and --raw exclude each other; give one")
    if args.show_drafts and (args.n > 1 or args.json):
        raise ConfigError("--show-drafts needs one streamed completion: leave out --n and --json")
    set_threads(args.threads)
    engine = Engine(args.model, drafter=args.drafter, dtype=args.dtype, device=args.device)
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
    )
    prompt = _prompt(engine, args)
    report = RolloutReport()
    if args.n == 1 and not args.json:
        stream = engine.stream(prompt, params, seed=args.seed, on_step=report.add)
        completions = [_print_stream(stream, colour=args.show_drafts)]
    else:
        completions = engine.generate(
            [prompt], params, n=args.n, seed=args.seed, on_step=report.add
        )
        _print(completions, as_json=args.json)
    _summarize(completions, report)
    return 0


def _prompt(engine: Engine, args: GenerateOptions) -> PromptInput:
    """Read the prompt; raise ConfigError, before weights are read, if the model cannot take it."""
    try:
        text = _standard_input() if args.prompt is None else args.prompt
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 ({error.reason}); give text") from error
    if not text:
        raise ConfigError("--prompt is empty; give some text, here or on standard input")
    is_chat = args.chat or (engine.tokenizer.has_chat_template and not args.raw)
    prompt: PromptInput = [{"role": "user", "content": text}] if is_chat else text
    try:
        engine.encode(prompt, args.max_tokens)
    except RequestError as error:
        raise ConfigError(f"--prompt, --max-tokens: {error}") from error
    return prompt


def _standard_input() -> str:
    print("reading the prompt from standard input; --prompt gives one, too", file=sys.stderr)
    text = sys.stdin.read(_MOST_PROMPT + 1)
    if len(text) > _MOST_PROMPT:
        raise ConfigError(f"standard input has no end after {_MOST_PROMPT:,} characters; give less")
    return text


def _print_stream(stream: TextStream, *, colour: bool) -> Completion:
    """Print one completion while it is generated."""
    for piece in stream:
        sys.stdout.write(coloured(piece) if colour else piece.text)
        sys.stdout.flush()
    print()
    assert stream.completion is not None, "a stream ends with its completion"
    return stream.completion


def coloured(piece: Piece) -> str:
    """Return the text of a piece, in colour if it was drafted."""
    return f"{_DRAFTED}{piece.text}{_PLAIN}" if piece.drafted else piece.text


def _print(completions: Sequence[Completion], *, as_json: bool) -> None:
    for index, completion in enumerate(completions):
        row = {
            "index": index,
            "text": completion.text,
            "num_tokens": len(completion.tokens),
            "logprob": sum(completion.logprobs),
            "finish_reason": completion.finish_reason.value,
        }
        text = f"--- {index + 1} of {len(completions)}\n{completion.text}"
        print(json_line(row) if as_json else text)


def _summarize(completions: Sequence[Completion], report: RolloutReport) -> None:
    tokens, seconds = sum(len(each.tokens) for each in completions), report.seconds
    reasons = Counter(completion.finish_reason.value for completion in completions)
    endings = ", ".join(f"{reason} x{count}" for reason, count in sorted(reasons.items()))
    speed = f"{tokens} tokens in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s"
    drafts = f"; accept length {report.accept_length:.2f}" if report.num_verified else ""
    print(f"{speed}; finished by {endings}{drafts}", file=sys.stderr)
