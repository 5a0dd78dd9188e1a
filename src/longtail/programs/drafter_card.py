"""The README.md of an exported drafter, as the Hugging Face hub reads it: figures and provenance.

Every number was measured by whoever calls, or comes from the drafter's own record; what is not
known is said to be unknown.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtail.drafter.eagle.layer import EagleConfig
from longtail.drafter.formats.checkpoint import TargetIdentity, TrainingRecord
from longtail.drafter.formats.layouts import Layout
from longtail.engine.speculation.acceptance import POSITIONS
from longtail.programs.drafter_eval import Measured

_LIBRARY = {"vllm": "vllm", "sglang": "sglang", "speculators": "speculators", "hf": "transformers"}
_HF_NAMES = {"eagle1": ("eagle", "EAGLE"), "eagle3": ("eagle3", "EAGLE3")}
"""What vLLM and SGLang call the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measurement with a window.

    Example: Figure(window=32, measured=measured)
    """

    window: int
    """Pairs that a pair sees; 0: unbounded."""
    measured: Measured

    def line(self) -> str:
        """Say it."""
        return (
            f"temperature {self.measured.temperature:g}, window {_window(self.window)}: accept "
            f"length {self.measured.acceptance.overall.mean:.3f}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return every figure."""
        return {"window": self.window, **self.measured.as_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a card says.

    Example: Card(name="drafter", layout="vllm", base_model="org/model", license=None, ...)
    """

    name: str
    layout: Layout
    base_model: str
    license: str | None
    depth: int
    config: EagleConfig
    dtype: str
    engine_window: int
    """What the engine keeps to; 0: unbounded."""
    trained_on: TargetIdentity
    exported_for: TargetIdentity
    chat_template: str | None
    training: TrainingRecord
    score_error: float
    replayed: int
    prompts: str
    num_prompts: int
    figures: tuple[Figure, ...]


def write_card(path: Path, card: Card) -> None:
    """Write the card to a file."""
    path.write_text("\n".join(_lines(card)) + "\n", encoding="utf-8")


def launch(layout: Layout, recipe: str, depth: int, target: str, drafter: str) -> list[str]:
    """Return the commands that serve a target with an exported drafter."""
    vllm, sglang = _HF_NAMES[recipe]
    options = {"method": vllm, "model": drafter, "num_speculative_tokens": depth}
    with_vllm = f"vllm serve {target} --speculative-config '{json.dumps(options)}'"
    with_sglang = (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {sglang} "
        f"--speculative-draft-model-path {drafter} --speculative-num-steps {depth} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {depth + 1}"
    )
    if layout == "sglang":
        return [with_sglang]
    return [with_vllm]


def _lines(card: Card) -> Iterator[str]:
    recipe = card.config.recipe
    yield from _front_matter(card)
    yield f"# {card.name}"
    yield ""
    yield (
        f"An {recipe.upper().replace('EAGLE', 'EAGLE-')} drafter for speculative decoding of "
        f"`{card.base_model}`, exported by longtail in the layout of {card.layout}. It is no model "
        "of its own: one decoder layer that reads the target's states."
    )
    yield ""
    yield "```bash"
    yield from launch(card.layout, recipe, card.depth, card.base_model, f"./{card.name}")
    yield "```"
    yield ""
    yield "## Provenance"
    yield ""
    yield from _table(("what", "which"), _provenance(card))
    yield ""
    yield "## Acceptance"
    yield ""
    yield from _acceptance(card)
    yield ""
    yield "## Notes"
    yield ""
    yield from _notes(card)


def _front_matter(card: Card) -> Iterator[str]:
    tags = ("speculative-decoding", card.config.recipe, "draft-model", "longtail")
    yield "---"
    yield f"base_model: {json.dumps(card.base_model)}"
    yield f"license: {json.dumps(card.license or 'unknown')}"
    yield f"library_name: {_LIBRARY[card.layout]}"
    yield "tags:"
    yield from (f"- {tag}" for tag in tags)
    yield "---"
    yield ""


def _provenance(card: Card) -> Iterator[tuple[str, str]]:
    trained, here, record, config = card.trained_on, card.exported_for, card.training, card.config
    weights = "the same" if trained.weights == here.weights else f"`{trained.weights}`"
    yield "target", f"`{card.base_model}`, weights digest `{here.weights}`"
    yield "trained on", f"`{trained.name}`, weights {weights}"
    yield "tokenizer digest", f"`{here.tokenizer}`"
    yield "chat template digest", _template_digest(card.chat_template)
    steps = f"{record.steps:,} steps, {record.tokens:,} tokens, unrolled {record.unroll_steps} deep"
    yield "training", steps if record.steps else "not known"
    if record.accept_len is not None:
        overlaps = ", ".join(f"{value:.3f}" for value in record.overlap)
        expected = f"expected accept length {record.accept_len:.2f}"
        by_depth = f"; overlap by depth {overlaps}" if overlaps else ""
        yield "held out, at training", expected + by_depth
    inputs = f"the inputs of layers {', '.join(map(str, config.layers))}"
    yield "reads", inputs if config.layers else "the last normed state"
    vocabulary = config.target.vocab_size
    yield "draft vocabulary", f"{config.draft_vocab_size or vocabulary:,} of {vocabulary:,}"
    yield "dtype", card.dtype
    yield "license", card.license or "not stated by whoever exported it"


def _template_digest(template: str | None) -> str:
    if template is None:
        return "no chat template"
    return f"`{hashlib.sha256(template.encode()).hexdigest()[:16]}`"


def _acceptance(card: Card) -> Iterator[str]:
    yield (
        "The files were read back by an independent reader (largest relative difference of scores "
        f"{card.score_error:.1e}), and {card.replayed} drafts were replayed, accepted alike."
    )
    yield ""
    if not card.figures:
        yield "Not measured (exported with --no-measure)."
        return
    yield (
        f"Accept length is tokens emitted per verify step, the bonus token included. Chains of "
        f"{card.depth}, {card.num_prompts} prompts ({card.prompts}), measured by longtail's own "
        "engine. Above temperature 0 longtail drafts with the target's own noise (coupled), which "
        "engines do not: expect less of them there."
    )
    yield ""
    deepest = max(len(each.measured.acceptance.rates()) for each in card.figures)
    depths = [f"depth {depth}" for depth in range(1, deepest + 1)]
    yield from _table(("temperature", "window", "accept length", *depths), map(_row, card.figures))
    yield ""
    yield "Accept length by generated tokens before the step:"
    yield ""
    starts = [f"{start}+" for start in POSITIONS]
    yield from _table(("temperature", "window", *starts), map(_by_length, card.figures))


def _row(each: Figure) -> tuple[str, ...]:
    found = each.measured
    rates = [f"{rate:.3f}" for rate in found.acceptance.rates()]
    mean = f"{found.acceptance.overall.mean:.3f}"
    return (f"{found.temperature:g}", _window(each.window), mean, *rates)


def _by_length(each: Figure) -> tuple[str, ...]:
    found = each.measured.acceptance.by_position()
    lengths = [f"{at.mean:.2f}" if at.num_verified else "" for at in found]
    return (f"{each.measured.temperature:g}", _window(each.window), *lengths)


def _notes(card: Card) -> Iterator[str]:
    window = card.config.window
    if window == card.engine_window:
        yield f"- Attention window: {_window(window)}, as trained; the configuration says so."
    else:
        yield (
            f"- Attention window: trained with {_window(window)}, but this layout has no field for "
            "one, so the engine attends to the whole context. The rows above with window "
            f"{_window(card.engine_window)} are what to expect of it."
        )
    yield "- Keep the tokenizer and the chat template of the target: another one lowers acceptance."
    yield "- Speculative decoding does not change what the target writes, only how soon."


def _window(window: int) -> str:
    return str(window) if window else "unbounded"


def _table(columns: Sequence[str], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        padded = (*row, *[""] * (len(columns) - len(row)))
        yield f"| {' | '.join(padded)} |"
