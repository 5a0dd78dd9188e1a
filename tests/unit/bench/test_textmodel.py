"""The model of ordinary text in miniature: what it reads, what is kept, what the table says."""

from pathlib import Path

import pytest
import torch

from longtail.bench.common.textmodel import (
    PROMPT_LEN,
    DrafterRecipe,
    TargetRecipe,
    TextModel,
    cut_windows,
    ensure,
    heldout_prompts,
    read_sources,
    write_tokenizer,
)
from longtail.bench.rollout.coupling import coupling
from longtail.bench.rollout.subjects import Subject
from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.formats.checkpoint import load_drafter
from longtail.model.hf.model import load_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.types import SamplingParams

SMALL_TARGET = TargetRecipe(
    megabytes=1.0,
    vocab_size=300,
    hidden_size=32,
    num_layers=4,
    num_heads=2,
    head_dim=16,
    window=48,
    steps=6,
    batch_tokens=384,
    warmup_steps=1,
)
SMALL_DRAFTER = DrafterRecipe(
    layers=(1, 2, 3), unroll_steps=2, texts=32, text_len=48, steps=4, batch_tokens=192
)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Sixty modules, and two directories that are not the library."""
    root = tmp_path / "lib"
    for folder in ("", "package", "test", "site-packages"):
        (root / folder).mkdir(exist_ok=True, parents=True)
        for index in range(30):
            text = "".join(f"def {folder}{index}(x):\n    return x + {i}\n" for i in range(6))
            (root / folder / f"m{index:02}.py").write_text(text)
    return root


def test_the_library_is_read_without_its_tests(library: Path):
    sources = read_sources(1.0, library)
    assert len(sources.learned) == 57
    assert len(sources.heldout) == 3
    text = "".join((*sources.learned, *sources.heldout))
    assert "package" in text
    assert "test" not in text
    assert "site" not in text


def test_no_more_is_read_than_was_asked_for(library: Path):
    sources = read_sources(0.002, library)
    assert 1500 < sum(map(len, sources.learned)) <= 2000
    assert sources.digest() != read_sources(1.0, library).digest()
    assert sources.digest() == read_sources(0.002, library).digest()


def test_windows_hold_the_text_with_ends_between_files(library: Path, tmp_path: Path):
    texts = read_sources(1.0, library).learned
    write_tokenizer(texts, 280, tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    windows = cut_windows(texts, tokenizer, 16)
    assert {len(window) for window in windows} == {16}
    tokens = [token for window in windows for token in window]
    assert tokenizer.decode(tokens) == "".join(texts)[: len(tokenizer.decode(tokens))]
    assert tokens.count(tokenizer.eos_ids[0]) >= 56


@pytest.mark.slow
def test_the_model_and_its_drafter_are_made_once_and_drafts_change_no_text(
    library: Path, tmp_path: Path
):
    lines: list[str] = []

    def make() -> TextModel:
        recipes = {"target": SMALL_TARGET, "drafter": SMALL_DRAFTER}
        return ensure(lines.append, tmp_path, **recipes, root=library)

    made = make()
    assert any("6/6" in line for line in lines)
    assert any("4/4" in line for line in lines)

    lines.clear()
    assert made == make()
    assert not lines
    assert {path.parent for path in (made.target, made.drafter)} == {tmp_path / "text-model"}
    assert len(list((tmp_path / "text-model").iterdir())) == 2, "nothing half made is left"

    prompts = heldout_prompts(made, 3, SMALL_TARGET, library)
    assert [len(prompt) for prompt in prompts] == [PROMPT_LEN] * 3
    model, tokenizer = load_model(made.target, torch.float64), load_tokenizer(made.target)

    def make_drafter() -> EagleDrafter:
        loaded = load_drafter(made.drafter, model, tokenizer, strict_weights=True)
        return EagleDrafter(loaded.layer, model)

    subject = Subject(
        name="text",
        model=model,
        decode=tokenizer.decode,
        prompts=prompts,
        sampling=SamplingParams(),
        drafters={"eagle3": make_drafter},
    )
    rows = coupling(subject, prompts, temperatures=(0.0, 1.0), max_tokens=8, depth=3)
    assert [row.temperature for row in rows] == [0.0, 1.0]
    assert rows[0].entropy == 0.0
    assert rows[0].coupled == rows[0].uncoupled, "greedy decoding hears no noise"
    assert rows[1].entropy > 1.0
    for row in rows:
        assert row.differing_share == 0.0
        assert 1.0 <= row.uncoupled <= 4.0
