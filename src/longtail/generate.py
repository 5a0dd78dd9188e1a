"""`longtail generate`: completions of one prompt, with a model or a run's newest checkpoint.

The text goes to stdout, what it cost to stderr. It reads directories and asks the rollout engine;
it trains nothing and grades nothing.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from longtail.assemble import TINY_REASONER, model_directory
from longtail.checkpoint import policy_directory
from longtail.device import DTYPES, set_threads
from longtail.drafters import Target, open_drafters
from longtail.engine.acceptance import Acceptance, AcceptLength
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.speculate import Speculation
from longtail.engine.text import find_stop
from longtail.errors import ConfigError
from longtail.model import hf
from longtail.sampling import noise_key
from longtail.tuner.budget import BudgetTuner
from longtail.types import Completion, Request, SamplingParams

_MAX_RUNNING = 64


def run(args: argparse.Namespace) -> int:
    """Generate as the command line says; see `cli` for the options."""
    if args.n < 1:
        raise ConfigError(f"--n = {args.n}: it must be at least 1")
    set_threads(args.threads)
    path = model_directory(args.model)
    path = path if args.model == TINY_REASONER else policy_directory(path)
    tokenizer = hf.load_tokenizer(path)
    tokens = _prompt_tokens(tokenizer, args)
    sampling = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        stop_token_ids=tokenizer.eos_ids,
    )
    engine = _engine(args, path, tokenizer, len(tokens))
    _speculate(args, engine, path, tokenizer)
    acceptance = Acceptance()
    requests = [
        Request(
            request_id=f"{index}",
            prompt_tokens=tokens,
            noise_key=noise_key(args.seed, "generate", index),
            sampling=sampling,
            group_id="prompt" if args.n > 1 else "",
        )
        for index in range(args.n)
    ]
    started = time.perf_counter()
    if args.n == 1 and not args.json:
        completions = [_stream(engine, requests[0], acceptance)]
    else:
        completions = engine.generate(requests, lambda step: acceptance.add(step.verified))
        _print(completions, as_json=args.json)
    _summarize(completions, time.perf_counter() - started, acceptance.overall)
    return 0


def visible(pieces: Iterator[str | Completion], stop: Sequence[str]) -> Iterator[str]:
    """Turn a stream into the text of its completion, piece by piece, nothing of a stop string.

    What may be the beginning of a stop string is held back until it is known not to be one.
    """
    held_len = max((len(s) for s in stop), default=1) - 1
    text, shown = "", 0
    for piece in pieces:
        if isinstance(piece, Completion):
            yield piece.text[shown:]
            return
        text += piece
        end = len(text[: find_stop(text, stop)]) if stop else len(text)
        end = max(shown, min(end, len(text) - held_len))
        yield text[shown:end]
        shown = end


def _prompt_tokens(tokenizer: hf.Tokenizer, args: argparse.Namespace) -> tuple[int, ...]:
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    if not prompt:
        raise ConfigError("--prompt is empty; give some text, here or on standard input")
    if args.chat or (tokenizer.has_chat_template and not args.raw):
        return tokenizer.chat([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt)


def _engine(
    args: argparse.Namespace, path: Path, tokenizer: hf.Tokenizer, prompt_len: int
) -> RolloutEngine:
    best = "cuda" if torch.cuda.is_available() else "cpu"
    device = best if args.device == "auto" else args.device
    model = hf.load_model(path, DTYPES[args.dtype] if args.dtype else None, device)
    hf.check_vocabulary(tokenizer, model.config)
    room = model.config.max_positions - prompt_len
    if args.max_tokens > room:
        raise ConfigError(
            f"--max-tokens = {args.max_tokens}: after a prompt of {prompt_len} tokens the model "
            f"has {max(room, 0)} of its {model.config.max_positions} positions left"
        )
    running = min(args.n, _MAX_RUNNING)
    limits = EngineLimits(
        max_running=running, max_step_tokens=512, max_len=prompt_len + args.max_tokens
    )
    return RolloutEngine(model, tokenizer.decode, limits)


def _speculate(
    args: argparse.Namespace, engine: RolloutEngine, path: Path, tokenizer: hf.Tokenizer
) -> None:
    """Let the engine draft ahead, as far as it pays."""
    target = Target(model=engine.model, tokenizer=tokenizer, directory=path, name=args.model)
    drafters = open_drafters(args.drafter, target, lambda text: print(text, file=sys.stderr))
    if drafters:
        engine.speculate(Speculation(drafters=drafters, tuner=BudgetTuner()))


def _stream(engine: RolloutEngine, request: Request, acceptance: Acceptance) -> Completion:
    """Write one completion to the terminal while it is made."""
    last: list[Completion] = []

    def pieces() -> Iterator[str | Completion]:
        for piece in engine.stream(request, lambda step: acceptance.add(step.verified)):
            if isinstance(piece, Completion):
                last.append(piece)
            yield piece

    for text in visible(pieces(), request.sampling.stop):
        sys.stdout.write(text)
        sys.stdout.flush()
    print()
    return last[0]


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
