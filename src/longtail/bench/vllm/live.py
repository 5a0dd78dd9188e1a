"""A better drafter, adopted by a running vLLM while requests run."""

from collections.abc import Callable
from dataclasses import dataclass

from longtail.bench.vllm.options import VllmBenchOptions
from longtail.bench.vllm.subject import Reply, Subject, differing_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Three turns of one engine over the same texts."""

    before: Reply
    """All with the earlier drafter."""
    during: Reply
    """The better drafter is adopted when half of the requests are done."""
    after: Reply
    """All with the better drafter."""

    @property
    def adopted_gain(self) -> float:
        """Accept length after the adoption over that before."""
        return self.after.accept_length / self.before.accept_length

    @property
    def differing_share(self) -> float:
        """Share of the texts of the later turns that are not those of the first."""
        first = self.before.tokens
        later = (self.during, self.after)
        return sum(differing_share(each.tokens, first) for each in later) / len(later)


def measure_live(subject: Subject, options: VllmBenchOptions, log: Callable[[str], None]) -> Live:
    """Start vLLM with the earlier drafter, and have it adopt the better one."""
    log("start vLLM: live")
    engine = subject.start("coupled", subject.earlier)
    try:
        log("live: before, during and after the adoption")
        return Live(
            before=engine.turn(0),
            during=engine.turn(0, adopt=subject.drafter),
            after=engine.turn(0),
        )
    finally:
        engine.close()
