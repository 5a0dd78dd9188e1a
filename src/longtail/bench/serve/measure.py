"""Measures points of `longtail bench serve`: one model, so many clients, one temperature.

Two servers hold the same weights; one drafts, one does not. Both live in this process, on one
pinned thread, and one sleeps while the other works. The clients are a process of their own, on
another CPU where there is one. Turns alternate, all with the same calls and seeds, so both write
the same texts.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, final

from longtail.bench.common.report import Spread, ratios
from longtail.bench.rollout import options as rollout_setting
from longtail.bench.rollout.subjects import make_subject
from longtail.bench.serve.client import Answer
from longtail.bench.serve.options import Setting
from longtail.build.trainer import TINY_REASONER, model_directory
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import ConfigError
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.model.transformer import Transformer
from longtail.rl.data import tiny_task as task
from longtail.serve.options import Limits
from longtail.serve.server import ModelServer, make_server, running
from longtail.speculation.drafter import Drafter
from longtail.tuner.budget import BudgetTuner

OFF, ON = "off", "on"
ROOM = 128
"""Tokens for a prompt."""
_PROBLEMS = 64
_RECIPE = "eagle1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with its drafter, and what it is asked."""

    name: str
    model: Transformer
    tokenizer: Tokenizer
    drafter: Callable[[], Drafter]
    prompts: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The calls of one turn, and the seconds until all were answered."""

    seconds: float
    answers: tuple[Answer, ...]

    @property
    def tokens_per_s(self) -> float:
        """Of all clients together."""
        return sum(answer.num_tokens for answer in self.answers) / self.seconds

    @property
    def token_s(self) -> float:
        """Seconds a token as its client waits for it, the first one included."""
        written = sum(answer.num_tokens for answer in self.answers)
        return sum(answer.total_s for answer in self.answers) / max(written, 1)

    @property
    def first_s(self) -> float:
        """Seconds to the first token, the median call's."""
        return median(answer.first_s for answer in self.answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What drafting is worth to so many clients; the n-th turns were made beside each other."""

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
        """Seconds a token without drafts over those with them."""
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
        """Share of the texts that drafting changed; law 1 says none."""
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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

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


def open_subject(name: str, setting: Setting, say: Callable[[str], None]) -> Subject:
    """Load the tiny reasoner with its drafter, as it is or grown to 100M parameters."""
    cells = rollout_setting.Setting(
        models=(name,),
        drafters=(_RECIPE,),
        running=setting.clients,
        dtype=setting.dtype,
        tokens=setting.tokens,
        repeats=setting.repeats,
        threads=setting.threads,
        length=False,
    )
    made = make_subject(name, cells, say)
    tokenizer = load_tokenizer(model_directory(TINY_REASONER, say))
    rows = task.problems(_PROBLEMS, 1, "heldout")
    return Subject(
        name=name,
        model=made.model,
        tokenizer=tokenizer,
        drafter=made.drafters[_RECIPE],
        prompts=tuple(tokenizer.render(row["prompt"]) for row in rows),
        dtype=cells.dtype_of(name),
    )


def serve_subject(subject: Subject, limits: Limits, *, drafts: bool) -> ModelServer:
    """Put an engine of its own behind a server of its own."""
    sizes = EngineLimits(
        max_running=limits.max_running, max_step_tokens=512, max_len=limits.max_len
    )

    def make_engine() -> RolloutEngine:
        speculation = Speculation(drafters=(subject.drafter(),), tuner=BudgetTuner())
        engine = RolloutEngine(subject.model, subject.tokenizer.decode, sizes)
        engine.speculate(speculation if drafts else None)
        return engine

    return make_server(make_engine, subject.tokenizer, limits, name=subject.name)


@contextmanager
def both_arms(subject: Subject, setting: Setting) -> Iterator[dict[str, int]]:
    """Run a server that does not draft and one that does; their ports."""
    limits = Limits(max_running=max(*setting.clients, 16), max_len=ROOM + setting.tokens)
    with ExitStack() as stack:
        yield {
            arm: stack.enter_context(running(serve_subject(subject, limits, drafts=arm == ON)))
            for arm in (OFF, ON)
        }


def calls(
    subject: Subject, setting: Setting, temperature: float, count: int, *, stream: bool = True
) -> list[dict[str, Any]]:
    """Write so many calls; the same for whoever is measured."""
    options: dict[str, Any] = {"max_tokens": setting.tokens, "temperature": temperature}
    if stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    return [
        {"model": subject.name, "prompt": subject.prompts[n % _PROBLEMS], "seed": n, **options}
        for n in range(count)
    ]


def measure(
    subject: Subject, setting: Setting, ports: dict[str, int], clients: Clients,
    say: Callable[[str], None],
) -> list[Point]:  # fmt: skip
    """Measure every number of clients at every temperature."""
    points = []
    for temperature in setting.temperatures:
        for count in setting.clients:
            asked = calls(subject, setting, temperature, count * setting.calls)
            turns: dict[str, list[Turn]] = {arm: [] for arm in ports}
            for number in range(1 + setting.repeats):  # the first warms up
                for arm in sorted(ports, reverse=number % 2 == 0):
                    turn = clients.turn(ports[arm], count, asked)
                    if number:
                        turns[arm].append(turn)
            point = Point(
                model=subject.name,
                temperature=temperature,
                clients=count,
                off=tuple(turns[OFF]),
                on=tuple(turns[ON]),
            )
            points.append(point)
            say(f"{point.name}, {count} clients: throughput {point.throughput_ratio.text()} x off")
    return points
