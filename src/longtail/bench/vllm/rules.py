"""The same drafter in vLLM under several rules of drafting: acceptance, speed, texts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

from longtail.bench.common.timing import Spread
from longtail.bench.vllm.options import VllmBenchOptions
from longtail.bench.vllm.subject import Engine, Reply, Subject, differing_share

RULES = ("plain", "coupled", "greedy", "probabilistic")
DRAFTING = RULES[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Turns of each rule, with the same seeds in each round."""

    engine: str
    turns: Mapping[str, list[Reply]]
    own_texts_share: float | None
    """Share of the first round's plain texts that longtail's own engine writes, too."""

    @property
    def accept_length(self) -> dict[str, float]:
        """Tokens per verified step of each rule that drafts, over all rounds."""
        found = {}
        for rule in DRAFTING:
            accepted = sum(each.num_accepted for each in self.turns[rule])
            found[rule] = 1 + accepted / max(sum(each.num_drafts for each in self.turns[rule]), 1)
        return found

    @property
    def differing_share(self) -> float:
        """Share of texts with coupled drafts that are not those of plain decoding."""
        return self.differing(lambda _rule: _rule == "coupled")["coupled"]

    def differing(self, of: Callable[[str], bool] = lambda _rule: True) -> dict[str, float]:
        """Return, by rule, the share of texts that are not those of plain decoding."""
        return {
            rule: fmean(
                differing_share(a.tokens, b.tokens)
                for a, b in zip(self.turns[rule], self.turns["plain"], strict=True)
            )
            for rule in DRAFTING
            if of(rule)
        }

    def speed(self, rule: str) -> Spread:
        """Return tokens/s."""
        return Spread.of([each.tokens_per_s for each in self.turns[rule]])

    def throughput_ratio(self, rule: str) -> Spread:
        """Return tokens/s over those of plain decoding in the same round."""
        pairs = zip(self.turns[rule], self.turns["plain"], strict=True)
        return Spread.of([a.tokens_per_s / b.tokens_per_s for a, b in pairs])


def measure_rules(subject: Subject, options: VllmBenchOptions, log: Callable[[str], None]) -> Rules:
    """Start one vLLM for each rule, and have them generate in turns."""
    engines: dict[str, Engine] = {}
    try:
        for rule in RULES:
            log(f"start vLLM: {rule}")
            engines[rule] = subject.start(rule)
        turns: dict[str, list[Reply]] = {rule: [] for rule in RULES}
        for number in range(-1, options.repeats):  # the first round warms up
            for rule, engine in engines.items():
                log(f"round {number + 1} of {options.repeats}: {rule}")
                reply = engine.turn(max(number, 0))
                if number >= 0:
                    turns[rule].append(reply)
        description = engines["plain"].description
    finally:
        for engine in engines.values():
            engine.close()
    own = None
    if options.dtype == "float32":
        own = 1 - differing_share(subject.own_texts(0), turns["plain"][0].tokens)
    return Rules(engine=description, turns=turns, own_texts_share=own)
