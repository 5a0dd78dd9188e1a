"""longtail's engines as contestants that take turns, a step of each at a time."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from longtail.engine.engine import RolloutEngine
from longtail.engine.report import RolloutReport
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.speculation.drafter import Drafter
from longtail.tuner.budget_tuner import BudgetTuner
from longtail.tuner.messages import Outcome
from longtail.types import Completion
from subject import Subject

_STEP_TOKENS = 9
"""Flat tokens of a request in a step for which there is room: its root and a draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a contestant, of longtail or of another engine."""

    seconds: float
    cpu_seconds: float
    """CPU seconds of all threads; below `seconds` when something else had the core."""
    num_tokens: int
    accept_length: float = 0.0
    """Tokens per verified draft; 0 without any."""
    texts: tuple[tuple[int, ...], ...] = ()
    """Tokens of each text; empty for other engines, whose noise is another."""
    seconds_share: float = 0.0
    """Predicted over measured seconds of the steps that verified drafts; 0 without any."""
    nodes_share: float = 0.0
    """Expected over accepted nodes of these steps."""
    limit_share: float = 0.0
    """Least seconds of the steps on this machine, over those that they took."""


class WatchedTuner(BudgetTuner):
    """A tuner whose predictions are compared with the steps, from which costs learned a little."""

    def begin_turn(self) -> None:
        """Forget all steps."""
        self.seconds = self.nodes = (0.0, 0.0)
        """Sums of what was predicted, and of what came."""

    def learn(self, outcome: Outcome) -> None:
        """Compare a step that verified drafts and read no prompts."""
        if outcome.num_nodes and outcome.batch.num_tokens == outcome.batch.num_sampled:
            known, came = self.seconds
            took_s = outcome.seconds - outcome.catch_up_s
            self.seconds = known + self._costs.outcome_s(outcome), came + took_s
            known, came = self.nodes
            self.nodes = known + outcome.num_expected, came + outcome.num_accepted
        super().learn(outcome)


class OwnEngine:
    """longtail's engine as one contestant."""

    def __init__(self, subject: Subject, batch: int, drafters: tuple[Drafter, ...] = ()) -> None:
        self._subject = subject
        self._tuner = WatchedTuner()
        limits = EngineLimits(
            max_running=batch,
            max_step_tokens=max(512, batch * _STEP_TOKENS),
            max_len=subject.max_len,
        )
        target = subject.target
        self._engine = RolloutEngine(
            target.model,
            target.tokenizer.decode,
            limits,
            speculation=Speculation(drafters=drafters, tuner=self._tuner) if drafters else None,
        )

    def begin(self, first: int, num_texts: int) -> None:
        """Submit the texts of a turn, from number `first` on."""
        self._requests = self._subject.requests(num_texts, first=first)
        self._meter, self._done = RolloutReport(), dict[str, Completion]()
        self._tuner.begin_turn()
        self._seconds = self._cpu_seconds = self._least_s = 0.0
        for request in self._requests:
            self._engine.submit(request)

    def step(self) -> bool:
        """Make one step of the turn; return whether there are more."""
        start, cpu_start = time.perf_counter(), time.process_time()
        report = self._engine.step()
        self._seconds += time.perf_counter() - start
        self._cpu_seconds += time.process_time() - cpu_start
        self._least_s += self._subject.limit.seconds(report.num_tokens)
        self._meter.add(report)
        self._done |= {each.request_id: each for each in report.finished}
        return len(self._done) < len(self._requests)

    def end(self) -> Turn:
        """Return the turn."""
        texts = tuple(self._done[each.request_id].tokens for each in self._requests)
        return Turn(
            seconds=self._seconds,
            cpu_seconds=self._cpu_seconds,
            num_tokens=sum(map(len, texts)),
            accept_length=self._meter.accept_length,
            texts=texts,
            seconds_share=_share(*self._tuner.seconds),
            nodes_share=_share(*self._tuner.nodes),
            limit_share=_share(self._least_s, self._seconds),
        )


def _share(predicted: float, came: float) -> float:
    return predicted / came if came else 0.0


def round_of(engines: Mapping[str, OwnEngine], first: int, num_texts: int) -> dict[str, Turn]:
    """Write the texts with all engines, a step of each at a time."""
    for engine in engines.values():
        engine.begin(first, num_texts)
    writing = list(engines.values())
    while writing:
        writing = [engine for engine in writing if engine.step()]
    return {name: engine.end() for name, engine in engines.items()}
