"""A damaged file that a run writes or reads is refused in one sentence, or changes nothing harmful.

Bits are flipped, bytes cut out, filled with zeros or exchanged, files truncated, removed, or put in
the place of others. What has digests (checkpoints) gives the same again or is refused; what comes
without (models, drafters) is refused or still is what a kernel can compute with.
"""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from longtail.cluster.work.drafter_versions import DrafterState
from longtail.config.rl import LoraSection
from longtail.drafter.formats.checkpoint import (
    LoadedDrafter,
    TrainingRecord,
    identity,
    load_drafter,
)
from longtail.drafter.formats.eagle_export import export_drafter
from longtail.drafter.formats.eagle_import import load_published
from longtail.drafter.ridge.layer import RidgeConfig
from longtail.drafter.ridge.sums import SequenceSums
from longtail.errors import LongtailError
from longtail.model.hf.adapters import AdaptedModel
from longtail.model.hf.model import load_model, save_model
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.model.transformer import Transformer
from longtail.run.checkpoint import RunDirectory
from longtail.run.drafter_store import DrafterStore
from longtail.speculation.strategy import Strategy
from support.causal import random_model
from support.eagle_requests import ridge_layer, text
from support.engine_requests import draftable, features_of, observed
from support.published import our_drafter, target_of_six
from support.tiny_models import save_tiny, tiny_model, tiny_tokenizer

CONFIG = '[model]\npath = "m"\n'


@dataclass(frozen=True)
class Place:
    """Files, and what reads and uses them."""

    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    has_digests: bool = False


@cache
def target() -> Transformer:
    model = target_of_six().eval()
    model.pack()
    return model


@cache
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def draft(loaded: LoadedDrafter) -> list[tuple[int, ...]]:
    """Draft with what was read, by the kernels."""
    assert all(bool(each.isfinite().all()) for each in loaded.layer.parameters())
    drafter = loaded.drafter(target())
    tokens = text(12)
    drafter.observe(
        [observed("a", tokens, 0, 11)], features_of(target(), tokens, drafter.taps)[:11]
    )
    trees = drafter.propose([draftable("a", tokens, 3, max_depth=9)], Strategy(depth=3), None)
    assert all(0 <= each < 128 for tree in trees for each in tree.tokens)
    return [tuple(tree.tokens) for tree in trees]


def ridge() -> LoadedDrafter:
    model, layer = target(), ridge_layer(RidgeConfig(target=target().config, slots=3))
    return LoadedDrafter(
        layer=layer,
        draft_ids=None,
        trained_on=identity("here", model, tokenizer()),
        training=TrainingRecord(steps=1, tokens=9, unroll_steps=1),
        sums=SequenceSums(model, 3).take().tensors(),
    )


def eagle() -> LoadedDrafter:
    return our_drafter(target(), tokenizer(), reduced=True)


def read_drafter(path: Path) -> Any:
    return draft(load_drafter(path, target(), tokenizer(), strict_weights=False))


def export(path: Path) -> None:
    export_drafter(path, eagle(), target(), torch.float32)


def read_export(path: Path) -> Any:
    return draft(load_published(path, "here", target(), tokenizer()))


def read_model(path: Path) -> Any:
    model, words = load_model(path), load_tokenizer(path)
    assert all(bool(each.isfinite().all()) for each in model.parameters())
    return words.eos_ids


def write_run(path: Path) -> None:
    with RunDirectory(path) as run:
        run.start(CONFIG, resume=True)
        tensors = {"rows": torch.arange(50), "moment": torch.linspace(0, 1, 300)}
        state = {"cursor": {"position": 16}, "seconds": 1.5, "threads": 1, "learner": {"a": 0.1}}
        for step in (1, 2):  # of the same content: either may be taken
            run.save(step, lambda folder: save_model(tiny_model(), folder), tensors, state)


def read_run(path: Path) -> Any:
    with RunDirectory(path) as run:
        found = run.load_latest()
        assert found is not None
        weights = dict(load_model(found.policy).named_parameters())
        return dict(found.state), sizes(found.tensors()), sizes(weights)


def sizes(tensors: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: each.flatten().tolist() for name, each in tensors.items()}


def write_state(path: Path) -> None:
    tensors = {"drafter/w": torch.linspace(0, 1, 100)}
    for step in (1, 2):
        DrafterStore(path).save(step, DrafterState(tensors=tensors, numbers={"version": 3}))


def read_state(path: Path) -> Any:
    found = DrafterStore(path).load(9)
    return None if found is None else (dict(found.numbers), sizes(dict(found.tensors)))


@cache
def adapted() -> AdaptedModel:
    return AdaptedModel(random_model("olmo2"), LoraSection(rank=2), 0)


def read_adapters(path: Path) -> Any:
    return sizes(dict(adapted().read(path)))


PLACES = {
    "ridge drafter": Place(lambda path: ridge().save(path), read_drafter),
    "eagle drafter": Place(lambda path: eagle().save(path), read_drafter),
    "published drafter": Place(export, read_export),
    "model": Place(save_tiny, read_model),
    "run": Place(write_run, read_run, has_digests=True),
    "drafter of a run": Place(write_state, read_state, has_digests=True),
    "adapters": Place(lambda path: adapted().save(path, ()), read_adapters),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("originals")
    for number, (name, place) in enumerate(PLACES.items()):
        place.write(root / str(number))
        assert place.read(root / str(number)), name
    return {name: root / str(number) for number, name in enumerate(PLACES)}


DAMAGE = st.tuples(
    st.sampled_from(["flip", "cut", "zero", "other", "truncate", "remove", "exchange"]),
    st.integers(0, 2**20),
    st.integers(0, 2**20),
    st.integers(0, 64),
)


def damage(files: list[Path], kind: str, which: int, place: int, size: int) -> None:
    """Damage one of the files; its first bytes, the header, are hit as often as all others."""
    path, data = files[which % len(files)], bytearray(files[which % len(files)].read_bytes())
    at = place % max(1, len(data) if place % 2 else min(len(data), 512))
    if kind == "remove":
        path.unlink()
        return
    if kind == "exchange":
        path.write_bytes(files[place % len(files)].read_bytes())
        return
    if kind == "flip" and data:
        data[at] ^= 1 << size % 8
    elif kind == "cut":
        del data[at : at + size]
    elif kind == "zero":
        data[at : at + size] = bytes(len(data[at : at + size]))
    elif kind == "other":
        data[at : at + size] = b"[-9e99]"[: len(data[at : at + size])]
    elif kind == "truncate":
        del data[at:]
    path.write_bytes(data)


@pytest.mark.slow
@given(name=st.sampled_from(sorted(PLACES)), hits=st.lists(DAMAGE, min_size=1, max_size=3))
def test_a_damaged_file_is_refused_in_one_sentence_or_harmless(originals, name, hits):
    place = PLACES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy"
        shutil.copytree(originals[name], path)
        for hit in hits:
            files = sorted(each for each in path.rglob("*") if each.is_file())
            if files:
                damage(files, *hit)
        try:
            found = place.read(path)
        except LongtailError as error:
            said = str(error)
            assert said.isprintable()
            assert len(said) < 2000
            return
    if place.has_digests:
        assert found in (None, place.read(originals[name]))
