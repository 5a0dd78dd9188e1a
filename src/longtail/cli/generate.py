"""`longtail generate`: completions of one prompt, with a model or a run's newest checkpoint.

The text goes to stdout, what it cost to stderr. It reads directories and asks the rollout engine;
it trains nothing and grades nothing.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

from longtail.build.engine import completion_key, locate_model, open_engine, open_model
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.report import Piece
from longtail.engine.speculation.acceptance import Acceptance, AcceptLength
from longtail.errors import ConfigError
from longtail.model.hf.model import load_config
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.system.device import set_threads
from longtail.types import Completion, Request, SamplingParams

_MAX_RUNNING = 64
_DRAFTED, _PLAIN = "\x1b[32m", "\x1b[0m"
"""What a terminal is told before and after text that a draft foretold: green."""


def run(args: argparse.Namespace) -> int:
    """Generate as the command line says; see `cli` for the options."""
    if args.n < 1:
        raise ConfigError(f"--n = {args.n}: it must be at least 1")
    if args.show_drafts and (args.n > 1 or args.json):
        raise ConfigError("--show-drafts colours a completion that is streamed: one, not --json")
    set_threads(args.threads)
    path = locate_model(args.model)
    tokenizer = load_tokenizer(path)
    positions = load_config(path).max_positions
    tokens = _prompt_tokens(tokenizer, args, positions)
    sampling = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        stop_token_ids=tokenizer.eos_ids,
    )
    limits = _limits(args, positions, len(tokens))
    target = open_model(
        args.model,
        path,
        tokenizer,
        args.dtype,
        args.device,
        batch_invariant=args.batch_invariant,
    )
    engine = open_engine(target, limits, args.drafter)
    acceptance = Acceptance()
    requests = [
        Request(
            request_id=f"{index}",
            prompt_tokens=tokens,
            noise_key=completion_key(args.seed, index),
            sampling=sampling,
            group_id="prompt" if args.n > 1 else "",
        )
        for index in range(args.n)
    ]
    started = time.perf_counter()
    if args.n == 1 and not args.json:
        completions = [_stream(engine, requests[0], acceptance, _shows(args.show_drafts))]
    else:
        completions = engine.generate(requests, lambda step: acceptance.add(step.verified))
        _print(completions, as_json=args.json)
    _summarize(completions, time.perf_counter() - started, acceptance.overall)
    return 0


def _prompt_tokens(
    tokenizer: Tokenizer, args: argparse.Namespace, positions: int
) -> tuple[int, ...]:
    try:
        prompt = sys.stdin.read() if args.prompt is None else args.prompt
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 ({error.reason}); give text") from error
    if not prompt:
        raise ConfigError("--prompt is empty; give some text, here or on standard input")
    if args.chat or (tokenizer.has_chat_template and not args.raw):
        prompt = tokenizer.render([{"role": "user", "content": prompt}])
    least = tokenizer.least_tokens(prompt)
    if least >= positions:  # known at once; to tokenize it would take minutes
        raise ConfigError(
            f"--prompt has at least {least} tokens: the model has {positions} positions; shorten it"
        )
    return tokenizer.encode(prompt)


def _limits(args: argparse.Namespace, positions: int, prompt_len: int) -> EngineLimits:
    room = positions - prompt_len
    if args.max_tokens > room:
        raise ConfigError(
            f"--max-tokens = {args.max_tokens}: after a prompt of {prompt_len} tokens the model "
            f"has {max(room, 0)} of its {positions} positions left"
        )
    running = min(args.n, _MAX_RUNNING)
    return EngineLimits(
        max_running=running, max_step_tokens=512, max_len=prompt_len + args.max_tokens
    )


def _shows(show_drafts: str | None) -> bool:
    """Tell whether drafts are coloured: `auto` only where someone sees colours, and wants them."""
    seen = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return show_drafts == "always" or (show_drafts == "auto" and seen)


def _stream(
    engine: RolloutEngine, request: Request, acceptance: Acceptance, shows_drafts: bool
) -> Completion:
    """Write one completion to the terminal while it is made."""
    pieces = engine.stream(request, lambda step: acceptance.add(step.verified))
    for piece in pieces:
        if isinstance(piece, Completion):
            print()
            return piece
        sys.stdout.write(coloured(piece) if shows_drafts else piece.text)
        sys.stdout.flush()
    raise AssertionError("a stream ends with its completion")


def coloured(piece: Piece) -> str:
    """Return a piece as a terminal shows it where drafts are marked."""
    return f"{_DRAFTED}{piece.text}{_PLAIN}" if piece.drafted else piece.text


def _print(completions: Sequence[Completion], *, as_json: bool) -> None:
    for index, completion in enumerate(completions):
        if as_json:
            row = {
                "index": index,
                "text": completion.text,
                "num_tokens": len(completion.tokens),
                "logprob": sum(completion.logprobs),
                "finish_reason": completion.finish_reason.value,
            }
            print(json.dumps(row, ensure_ascii=False))
        else:
            print(f"--- {index + 1} of {len(completions)}\n{completion.text}")


def _summarize(completions: Sequence[Completion], seconds: float, accepted: AcceptLength) -> None:
    tokens = sum(len(completion.tokens) for completion in completions)
    reasons = Counter(completion.finish_reason.value for completion in completions)
    endings = ", ".join(f"{reason} x{count}" for reason, count in sorted(reasons.items()))
    speed = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s"
    drafts = f"; accept length {accepted.mean:.2f}" if accepted.num_verified else ""
    print(f"{speed}; finished by {endings}{drafts}", file=sys.stderr)
