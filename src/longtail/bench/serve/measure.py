"""Points of `longtail bench serve`: one model, one number of clients, one temperature.

Two servers hold the same weights; one drafts, one does not. Both live in this process, on the same
pinned thread, and one sleeps while the other works. The clients are a process of their own, on
another CPU where there is one. Turns alternate, all with the same calls and seeds, so both servers
write the same texts.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, final

from longtail.assembly.models import TINY_REASONER, model_directory
from longtail.bench.common.process import Log
from longtail.bench.common.timing import Spread, ratios
from longtail.bench.rollout.subjects import make_subject
from longtail.bench.serve.client import Answer
from longtail.bench.serve.options import ServeBenchOptions
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import ConfigError
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.model.transformer import Transformer
from longtail.rl.data import tiny_task as task
from longtail.serve.middleware import Access
from longtail.serve.options import Limits
from longtail.serve.server import ModelServer, make_server, running
from longtail.speculation.drafter import Drafter
from longtail.tuner.budget import BudgetTuner

OFF, ON = "off", "on"
PROMPT_ROOM = 128
"""Tokens reserved for a prompt."""
_PROBLEMS = 64
_RECIPE = "eagle1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model with its drafter and prompts."""

    name: str
    model: Transformer
    tokenizer: Tokenizer
    drafter: Callable[[], Drafter]
    prompts: tuple[str, ...]
    dtype: str

    def server(self, limits: Limits, *, drafts: bool) -> ModelServer:
        """Return a server with an engine of its own."""
        sizes = EngineLimits(
            max_running=limits.max_running, max_step_tokens=512, max_len=limits.max_len
        )

        def make_engine() -> RolloutEngine:
            speculation = Speculation(drafters=(self.drafter(),), tuner=BudgetTuner())
            engine = RolloutEngine(self.model, self.tokenizer.decode, sizes)
            engine.speculate(speculation if drafts else None)
            return engine

        return make_server(make_engine, self.tokenizer, Access(limits=limits), name=self.name)

    def calls(
        self, temperature: float, max_tokens: int, count: int, *, stream: bool = True
    ) -> list[dict[str, Any]]:
        """Return the bodies of `count` calls, the same for every server."""
        options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
        if stream:
            options |= {"stream": True, "stream_options": {"include_usage": True}}
        return [
            {"model": self.name, "prompt": self.prompts[n % _PROBLEMS], "seed": n, **options}
            for n in range(count)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The answers of one turn, and the seconds until the last of them."""

    seconds: float
    answers: tuple[Answer, ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s of all clients together."""
        return sum(answer.num_tokens for answer in self.answers) / self.seconds

    @property
    def token_s(self) -> float:
        """Seconds per token as its client waits for it, the first one included."""
        num_tokens = sum(answer.num_tokens for answer in self.answers)
        return sum(answer.total_s for answer in self.answers) / max(num_tokens, 1)

    @property
    def first_s(self) -> float:
        """Seconds to the first token of the median call."""
        return median(answer.first_s for answer in self.answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Turns of both servers; the n-th turns ran one right after the other."""

    model: str
    temperature: float
    clients: int
    off: tuple[Turn, ...]
    on: tuple[Turn, ...]

    @property
    def name(self) -> str:
        """Model and temperature, as in `tiny t=0`."""
        return f"{self.model} t={self.temperature:g}"

    @property
    def latency_speedup(self) -> Spread:
        """Seconds per token without drafts over those with drafts."""
        return ratios([turn.token_s for turn in self.off], [turn.token_s for turn in self.on])

    @property
    def first_token_ratio(self) -> Spread:
        """Seconds to the first token with drafts over those without: 1 is no delay."""
        return ratios([turn.first_s for turn in self.on], [turn.first_s for turn in self.off])

    @property
    def throughput_ratio(self) -> Spread:
        """Tokens/s with drafts over those without."""
        on, off = ([turn.tokens_per_s for turn in turns] for turns in (self.on, self.off))
        return ratios(on, off)

    @property
    def differing_share(self) -> float:
        """Share of the texts that drafting changed; it must be 0."""
        pairs = [
            (one.text, other.text)
            for off, on in zip(self.off, self.on, strict=True)
            for one, other in zip(off.answers, on.answers, strict=True)
        ]
        return sum(one != other for one, other in pairs) / len(pairs)


@final
class Clients:
    """The clients' process. Lifecycle: started -> turn* -> close, also by `with`."""

    def __init__(self, cpus: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "longtail.bench.serve.client", *map(str, cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def turn(self, port: int, clients: int, calls: Sequence[dict[str, Any]]) -> Turn:
        """Make the calls. Raises ConfigError unless every one is answered with a text."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"port": port, "clients": clients, "calls": list(calls)}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        done = json.loads(self._process.stdout.readline())
        answers = tuple(Answer(**each) for each in done["answers"])
        for answer in answers:
            if answer.status != 200 or not answer.is_whole:
                raise ConfigError(f"a server answered {answer.status}: {answer.text[:300]}")
        return Turn(seconds=done["seconds"], answers=answers)


def open_model(name: str, options: ServeBenchOptions, log: Log) -> ServedModel:
    """Load the tiny reasoner with its drafter, as it is or grown to 100M parameters."""
    subject = make_subject(name, options.dtype_of(name), (_RECIPE,), log)
    tokenizer = load_tokenizer(model_directory(TINY_REASONER, log))
    rows = task.problems(_PROBLEMS, 1, "heldout")
    return ServedModel(
        name=name,
        model=subject.model,
        tokenizer=tokenizer,
        drafter=subject.drafters[_RECIPE],
        prompts=tuple(tokenizer.render(row["prompt"]) for row in rows),
        dtype=options.dtype_of(name),
    )


@contextmanager
def both_servers(served: ServedModel, options: ServeBenchOptions) -> Iterator[dict[str, int]]:
    """Run a server that does not draft and one that does; yield their ports."""
    limits = Limits(max_running=max(*options.clients, 16), max_len=PROMPT_ROOM + options.tokens)
    with ExitStack() as stack:
        yield {
            arm: stack.enter_context(running(served.server(limits, drafts=arm == ON)))
            for arm in (OFF, ON)
        }


def measure(
    served: ServedModel,
    options: ServeBenchOptions,
    ports: Mapping[str, int],
    clients: Clients,
    log: Log,
) -> list[Point]:
    """Measure every number of clients at every temperature."""
    points = []
    for temperature in options.temperatures:
        for count in options.clients:
            calls = served.calls(temperature, options.tokens, count * options.calls)
            turns: dict[str, list[Turn]] = {arm: [] for arm in ports}
            for number in range(1 + options.repeats):  # the first is a warm-up
                for arm in sorted(ports, reverse=number % 2 == 0):
                    turns[arm].append(clients.turn(ports[arm], count, calls))
            point = Point(
                model=served.name,
                temperature=temperature,
                clients=count,
                off=tuple(turns[OFF][1:]),
                on=tuple(turns[ON][1:]),
            )
            points.append(point)
            log(f"{point.name}, {count} clients: throughput {point.throughput_ratio.text()} x off")
    return points
