"""The README.md of an exported drafter, in the format of the Hugging Face hub.

Every number was measured at export or is from the drafter's training record; unknown ones are
stated as unknown.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtail.assembly.drafters import Target
from longtail.drafter.formats.checkpoint import LoadedDrafter, identity
from longtail.drafter.formats.layouts import Layout, engine_window
from longtail.engine.speculation.acceptance import POSITIONS
from longtail.programs.drafter_eval import Measurement

_LIBRARY = {"vllm": "vllm", "sglang": "sglang", "speculators": "speculators", "hf": "transformers"}
NOT_MEASURED = "not measured at export; `longtail drafter eval` measures it on prompts"
_METHODS = {"eagle1": ("eagle", "EAGLE"), "eagle3": ("eagle3", "EAGLE3")}
"""Names of the recipes in vLLM and in SGLang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measurement with an attention window.

    Example: Figure(window=32, measured=measurement)
    """

    window: int
    """Number of pairs that a pair attends to; 0: unbounded."""
    measured: Measurement

    def line(self) -> str:
        """Return a console line."""
        return (
            f"temperature {self.measured.temperature:g}, window {_window(self.window)}: accept "
            f"length {self.measured.acceptance.overall.mean:.3f}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return all values, fit for JSON."""
        return {"window": self.window, **self.measured.as_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Contents of a card.

    Example: Card(name="drafter", layout="vllm", base_model="org/model", license=None, ...)
    """

    name: str
    layout: Layout
    base_model: str
    license: str | None
    depth: int
    """Tokens of a drafted chain."""
    loaded: LoadedDrafter
    target: Target
    target_name: str
    score_error: float
    replayed: int
    prompts: str
    num_prompts: int
    figures: Sequence[Figure]


def write_card(path: Path, card: Card) -> None:
    """Write the card to a file."""
    path.write_text("\n".join(_lines(card)) + "\n", encoding="utf-8")


def launch(layout: Layout, recipe: str, depth: int, target: str, drafter: str) -> str:
    """Return the command that serves a target with an exported drafter."""
    vllm, sglang = _METHODS[recipe]
    if layout == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm "
            f"{sglang} --speculative-draft-model-path {drafter} --speculative-num-steps {depth} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {depth + 1}"
        )
    options = {"method": vllm, "model": drafter, "num_speculative_tokens": depth}
    return f"vllm serve {target} --speculative-config '{json.dumps(options)}'"


def _lines(card: Card) -> Iterator[str]:
    recipe = card.loaded.layer.config.recipe
    yield "---"
    yield f"base_model: {json.dumps(card.base_model)}"
    yield f"license: {json.dumps(card.license or 'unknown')}"
    yield f"library_name: {_LIBRARY[card.layout]}"
    yield "tags:"
    yield from (f"- {tag}" for tag in ("speculative-decoding", recipe, "draft-model", "longtail"))
    yield from ("---", "", f"# {card.name}", "")
    yield (
        f"An {recipe.upper().replace('EAGLE', 'EAGLE-')} drafter for speculative decoding of "
        f"`{card.base_model}`, exported by longtail in the layout of {card.layout}. It is one "
        "decoder layer that reads the target's hidden states, and cannot be used without the "
        "target."
    )
    command = launch(card.layout, recipe, card.depth, card.base_model, f"./{card.name}")
    yield from ("", "```bash", command, "```", "", "## Provenance", "")
    yield from _table(("item", "value"), _provenance(card))
    yield from ("", "## Acceptance", "")
    yield from _acceptance(card)
    yield from ("", "## Notes", "")
    yield from _notes(card)


def _provenance(card: Card) -> Iterator[tuple[str, str]]:
    trained, record = card.loaded.trained_on, card.loaded.training
    config, template = card.loaded.layer.config, card.target.tokenizer.chat_template
    here = identity(card.target_name, card.target.model, card.target.tokenizer)
    weights = "the same" if trained.weights == here.weights else f"`{trained.weights}`"
    yield "target", f"`{card.base_model}`, weights digest `{here.weights}`"
    yield "trained on", f"`{trained.name}`, weights {weights}"
    yield "tokenizer digest", f"`{here.tokenizer}`"
    digest = None if template is None else hashlib.sha256(template.encode()).hexdigest()[:16]
    yield "chat template digest", "no chat template" if digest is None else f"`{digest}`"
    steps = f"{record.steps:,} steps, {record.tokens:,} tokens, unrolled {record.unroll_steps} deep"
    yield "training", steps if record.steps else "unknown"
    if record.accept_len is not None:
        overlaps = ", ".join(f"{value:.3f}" for value in record.overlap)
        expected = f"expected accept length {record.accept_len:.2f}"
        by_depth = f"; overlap by depth {overlaps}" if overlaps else ""
        yield "held-out text, at training", expected + by_depth
    inputs = f"the inputs of layers {', '.join(map(str, config.layers))}"
    yield "reads", inputs if config.layers else "the final hidden state"
    vocabulary = config.target.vocab_size
    yield "draft vocabulary", f"{config.draft_vocab_size or vocabulary:,} of {vocabulary:,}"
    yield "dtype", str(card.loaded.layer.dtype).removeprefix("torch.")
    yield "license", card.license or "not stated"


def _acceptance(card: Card) -> Iterator[str]:
    yield (
        "The files were read back by an independent reader (largest relative difference of scores "
        f"{card.score_error:.1e}), and {card.replayed} drafts were replayed with equal acceptance."
    )
    yield ""
    if not card.figures:
        yield f"{NOT_MEASURED.capitalize()}."
        return
    yield (
        "Accept length is the number of tokens emitted per verify step, the bonus token included. "
        f"Drafts are chains of {card.depth} for {card.num_prompts} prompts ({card.prompts}), "
        "measured with longtail's engine. Above temperature 0 longtail drafts with the target's "
        "noise (coupled); other engines do not, so their accept lengths are shorter."
    )
    yield ""
    deepest = max(len(each.measured.acceptance.rates()) for each in card.figures)
    depths = [f"depth {depth}" for depth in range(1, deepest + 1)]
    yield from _table(("temperature", "window", "accept length", *depths), map(_row, card.figures))
    yield from ("", "Accept length by generated tokens before the step:", "")
    starts = [f"{start}+" for start in POSITIONS]
    rows = [(*_setting(each), *each.measured.lengths()) for each in card.figures]
    yield from _table(("temperature", "window", *starts), rows)


def _setting(figure: Figure) -> tuple[str, str]:
    return f"{figure.measured.temperature:g}", _window(figure.window)


def _row(figure: Figure) -> tuple[str, ...]:
    found = figure.measured.acceptance
    rates = [f"{rate:.3f}" for rate in found.rates()]
    return (*_setting(figure), f"{found.overall.mean:.3f}", *rates)


def _notes(card: Card) -> Iterator[str]:
    config = card.loaded.layer.config
    engines = engine_window(card.layout, config)
    if config.window == engines:
        yield f"- Attention window: {_window(engines)}, as trained; config.json contains it."
    else:
        yield (
            f"- Attention window: trained with {_window(config.window)}, but this layout has no "
            "field for one, so the engine attends to the whole context. Expect the rows above with "
            f"window {_window(engines)}."
        )
    yield "- Keep the tokenizer and the chat template of the target: others lower the acceptance."
    yield "- Speculative decoding does not change the target's texts, only its speed."


def _window(window: int) -> str:
    return str(window) if window else "unbounded"


def _table(columns: Sequence[str], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        padded = (*row, *[""] * (len(columns) - len(row)))
        yield f"| {' | '.join(padded)} |"
