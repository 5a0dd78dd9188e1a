"""`longtail drafter export`: a drafter as a directory that vLLM, SGLang or speculators serve.

    DRAFTER --> tensors, config.json, aside --> checked --> measured --> README.md --> in place

The check reads the files again, twice: by `LayoutReader`, which shares no code with our layer, to
compare scores; and by our own import, to draft for held-out prompts and be accepted as often. What
fails is not put in its place. The card's figures are measured here and now, or left out.
"""

import argparse
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from longtail.build.drafters import TINY_REASONER, Target, at_work, read_drafter
from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.eagle.unroll import Pairs, unroll
from longtail.drafter.formats.checkpoint import LoadedDrafter, identity
from longtail.drafter.formats.layout_reader import LayoutReader
from longtail.drafter.formats.layouts import (
    SECTION,
    Layout,
    check,
    own_window,
    to_config,
    to_tensors,
)
from longtail.drafter.formats.published import load_published
from longtail.engine.speculation.acceptance import AcceptLength
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import CheckpointError, ConfigError
from longtail.model.attention import PackedAttention
from longtail.model.hf.model import read_fields
from longtail.model.hf.weights import read_tensors, write_tensors
from longtail.model.transformer import Transformer
from longtail.programs.drafter_card import Card, Figure, write_card
from longtail.programs.drafter_eval import answer, measure, numbers, open_target
from longtail.rl.packing import lay_out
from longtail.run.checkpoint import UNWRITABLE
from longtail.speculation.strategy import Strategy
from longtail.system.device import DTYPES, set_threads
from longtail.types import SamplingParams

_TOLERANCE = 1e-9
"""Of scores, relative to the largest: two orders of float64 sums over a few thousand terms."""
_REPLAYED, _REPLAYED_TOKENS = 4, 128
"""Prompts, and tokens of each, that both drafters draft for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the check of an export found.

    Example: Checked(score_error=3e-15, num_scores=9000, accept_len=3.9, num_verified=120)
    """

    score_error: float
    """Largest difference of two readers' scores, relative to the largest score."""
    num_scores: int
    accept_len: float
    """Of the replay, the same for both."""
    num_verified: int


def run(args: argparse.Namespace) -> int:
    """Export as the command line says; see `cli` for the options."""
    set_threads(args.threads)
    layout: Layout = args.to
    out = Path(args.out)
    if out.exists():
        raise ConfigError(f"--out = {args.out!r} exists; remove it or choose another directory")
    Strategy(depth=args.depth)  # refuses what is no depth
    temperatures = [] if args.no_measure else numbers("--temperatures", args.temperatures)
    target, prompts = open_target(args)
    loaded = read_drafter(args.drafter, target, print, None)
    if loaded is None:
        raise ConfigError(
            f"{args.drafter}: it has no EAGLE layer to export; a small model is a Hugging Face "
            "directory already"
        )
    check(layout, loaded.layer.config)
    dtype = DTYPES[args.export_dtype] if args.export_dtype else loaded.layer.dtype
    loaded = rounded(loaded, dtype)
    aside = out.with_name(f".new-{out.name}-{os.getpid()}")
    try:
        write(aside, layout, loaded, target, dtype, verifier=_served(target), depth=args.depth)
        found = self_check(aside, loaded, target, prompts)
        figures = _figures(loaded, layout, target, prompts, args, temperatures)
        card = _card(args, layout, loaded, target, found, figures)
        write_card(aside / "README.md", card)
        aside.rename(out)
    except CheckpointError:  # it is an OSError, too, and says already what is wrong
        raise
    except UNWRITABLE as error:
        raise CheckpointError(
            f"the drafter cannot be written to {out}: {error}; free space or choose another path"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    _tell(out, layout, found, figures)
    return 0


def write(
    path: Path,
    layout: Layout,
    loaded: LoadedDrafter,
    target: Target,
    dtype: torch.dtype,
    *,
    verifier: str,
    depth: int,
) -> None:
    """Write config.json and the tensors of a drafter into a new directory."""
    path.mkdir(parents=True)
    config = loaded.layer.config
    content = to_config(layout, config, dtype, verifier=verifier, depth=depth)
    content[SECTION] |= {"target": asdict(loaded.trained_on), "training": asdict(loaded.training)}
    tensors = to_tensors(layout, loaded.layer, target.model, loaded.draft_ids, loaded.head, dtype)
    write_tensors(tensors, path)
    (path / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def rounded(loaded: LoadedDrafter, dtype: torch.dtype) -> LoadedDrafter:
    """Return the drafter as the files will hold it: scale folded, in the dtype written."""
    loaded.layer.fold()
    loaded.layer.to(dtype)
    head = None if loaded.head is None else loaded.head.to(dtype)
    return replace(loaded, head=head)


def self_check(
    path: Path, loaded: LoadedDrafter, target: Target, prompts: Sequence[tuple[int, ...]]
) -> Checked:
    """Read what was written and compare; CheckpointError if it is not the same drafter."""
    greedy = SamplingParams(
        temperature=0.0,
        max_tokens=_REPLAYED_TOKENS,
        stop_token_ids=target.tokenizer.eos_ids,
    )
    written = answer(target, prompts[:1], greedy, None)[0][0].tokens
    error, count = _score_error(path, loaded, target.model, (*prompts[0], *written))
    if not error <= _TOLERANCE:
        raise CheckpointError(
            f"{path}: the exported files score tokens otherwise than the drafter (by {error:.1e}); "
            "nothing is exported. This is a defect of longtail: please report it"
        )
    again = load_published(path, target.name, target.model, target.tokenizer)
    before, after = (_replay(each, target, prompts) for each in (loaded, again))
    if before != after:
        raise CheckpointError(
            f"{path}: the exported files are accepted {after} (greedily, with noise), the drafter "
            f"{before}; nothing is exported. This is a defect of longtail: please report it"
        )
    total = AcceptLength(
        num_verified=sum(each.num_verified for each in before),
        num_accepted=sum(each.num_accepted for each in before),
    )
    return Checked(
        score_error=error,
        num_scores=count,
        accept_len=total.mean,
        num_verified=total.num_verified,
    )


def fresh(loaded: LoadedDrafter) -> LoadedDrafter:
    """Return it with a layer of its own: whoever drafts with one packs it."""
    layer = EagleLayer(loaded.layer.config).to(loaded.layer.device, loaded.layer.dtype)
    layer.load_state_dict(loaded.layer.state_dict())
    return replace(loaded, layer=layer)


def _score_error(
    path: Path, loaded: LoadedDrafter, target: Transformer, tokens: Sequence[int]
) -> tuple[float, int]:
    """Compare the scores of both readers on a text, in float64, one depth after the other."""
    fields = read_fields(path).everything()
    layer = fresh(loaded).layer.double().cpu()
    config = layer.config = replace(layer.config, window=_read_window(fields))
    text = lay_out([tokens], [1])
    with torch.no_grad():
        tapped = target.forward_with_features(
            text.tokens.to(target.device), text.positions.to(target.device),
            PackedAttention(text.cu_seqlens), config.taps,
        )  # fmt: skip
        assert tapped.features is not None, "every recipe taps something"
        features = tapped.features.double().cpu()
        embeddings = target.embedding.weight.detach().cpu().double()[text.tokens]
        head = target.head.weight.detach().cpu().double()
        reader = LayoutReader(fields, read_tensors(path), config.shape.rope)
        theirs, _ = reader.read(features, embeddings, head)
        pairs = Pairs.of(text)
        output = unroll(layer, features[:-1], embeddings[1:], pairs, 1)[0]
        rows = head if loaded.draft_ids is None else head[loaded.draft_ids.cpu()]
        rows = rows if loaded.head is None else loaded.head.cpu()
        if config.recipe == "eagle3":  # written along, rounded like the rest
            rows = rows.to(loaded.layer.dtype)
        mine = output.scored @ rows.double().T
    if loaded.draft_ids is not None:
        theirs = theirs[:, loaded.draft_ids.cpu()]
    return float((mine - theirs).abs().max() / mine.abs().max()), mine.numel()


def _read_window(fields: Mapping[str, Any]) -> int:
    layer = fields.get("transformer_layer_config", fields)
    return int(layer.get("sliding_window") or 0) if "layer_types" in layer else 0


def _replay(
    loaded: LoadedDrafter, target: Target, prompts: Sequence[tuple[int, ...]]
) -> list[AcceptLength]:
    """Draft chains for a few prompts, greedily and with noise."""
    found = []
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(
            temperature=temperature,
            max_tokens=_REPLAYED_TOKENS,
            stop_token_ids=target.tokenizer.eos_ids,
        )
        drafter = at_work(fresh(loaded), target)
        fixed = Speculation.fixed(drafter, Strategy(depth=4))
        found.append(answer(target, prompts[:_REPLAYED], sampling, fixed)[1].overall)
    return found


def _figures(
    loaded: LoadedDrafter,
    layout: Layout,
    target: Target,
    prompts: Sequence[tuple[int, ...]],
    args: argparse.Namespace,
    temperatures: Sequence[float],
) -> list[Figure]:
    """Measure chains at each temperature, with the window trained and the window engines keep."""
    config, figures = loaded.layer.config, []
    windows = tuple(dict.fromkeys((config.window, own_window(layout, config))))
    for temperature in temperatures:
        sampling = SamplingParams(
            temperature=temperature,
            max_tokens=args.max_tokens,
            stop_token_ids=target.tokenizer.eos_ids,
        )
        plain = answer(target, prompts, sampling, None)[0]
        for window in windows:
            drafter = at_work(fresh(loaded), target, window=window)
            strategy = Strategy(depth=args.depth)
            found = measure(drafter, target, prompts, sampling, strategy, True, plain)
            figures.append(Figure(window=window, measured=found))
    return figures


def _card(
    args: argparse.Namespace,
    layout: Layout,
    loaded: LoadedDrafter,
    target: Target,
    found: Checked,
    figures: Sequence[Figure],
) -> Card:
    return Card(
        name=Path(args.out).name,
        layout=layout,
        base_model=args.base_model or _served(target),
        license=args.license,
        depth=args.depth,
        config=loaded.layer.config,
        dtype=str(loaded.layer.dtype).removeprefix("torch."),
        engine_window=own_window(layout, loaded.layer.config),
        trained_on=loaded.trained_on,
        exported_for=identity(args.target, target.model, target.tokenizer),
        chat_template=target.tokenizer.chat_template,
        training=loaded.training,
        score_error=found.score_error,
        replayed=found.num_verified,
        prompts=args.prompts or "held-out prompts",
        num_prompts=args.n,
        figures=tuple(figures),
    )


def _served(target: Target) -> str:
    """Name the model as an engine would load it: of a run, its newest checkpoint."""
    return target.name if target.name == TINY_REASONER else str(target.directory)


def _tell(out: Path, layout: Layout, found: Checked, figures: Sequence[Figure]) -> None:
    print(
        f"checked: an independent reader finds the same {found.num_scores:,} scores (largest "
        f"relative difference {found.score_error:.1e})\nreplayed: {found.num_verified} drafts, "
        f"accept length {found.accept_len:.3f} before and after"
    )
    for each in figures:
        print(each.line())
    print(f"drafter for {layout}: {out}")
    result = {
        "out": str(out),
        "layout": layout,
        "score_error": found.score_error,
        "replayed": found.num_verified,
        "figures": [each.as_json() for each in figures],
    }
    print(json.dumps(result))
