"""`longtail drafter export`: write a drafter in a layout that vLLM, SGLang or speculators serve.

    DRAFTER --> temporary directory --> check --> measure --> README.md --> renamed to --out

The check reads the files twice: with `LayoutReader`, which shares no code with our layer, to
compare scores, and with our import, to compare the acceptance of drafts. If it fails, nothing is
exported.
"""

import argparse
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from longtail.assembly.drafters import TINY_REASONER, Target, at_work, read_drafter
from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.eagle.unroll import Pairs, unroll
from longtail.drafter.eagle.weights import tensors_digest
from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.drafter.formats.layout_reader import LayoutReader
from longtail.drafter.formats.layouts import (
    SECTION,
    Layout,
    check,
    engine_window,
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
from longtail.model.sources.names import repository_of
from longtail.model.transformer import Transformer
from longtail.programs.drafter_card import NOT_MEASURED, Card, Figure, write_card
from longtail.programs.drafter_eval import (
    Workload,
    complete,
    decode,
    measure,
    numbers,
    sampling_of,
)
from longtail.programs.drafter_prompts import find_prompts, open_target, sample_prompts
from longtail.rl.packing import lay_out
from longtail.run.checkpoint import UNWRITABLE
from longtail.speculation.strategy import Strategy
from longtail.system.device import DTYPES, set_threads

_TOLERANCE = 1e-9
"""Largest relative error of scores: two orders of float64 sums over a few thousand terms."""
_REPLAYED, _REPLAYED_TOKENS = 4, 128
"""Number of prompts, and tokens of each, for which both drafters draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Result of the check of an export.

    Example: CheckResult(score_error=3e-15, num_scores=9000, accept_len=3.9, num_verified=120)
    """

    score_error: float
    """Largest difference of the two readers' scores, relative to the largest score."""
    num_scores: int
    accept_len: float
    """Accept length of the replay, equal for both drafters."""
    num_verified: int


def run(args: argparse.Namespace) -> int:
    """Run `longtail drafter export`; the options are in `cli.options`."""
    set_threads(args.threads)
    layout: Layout = args.to
    out = Path(args.out)
    if out.exists():
        raise ConfigError(f"--out = {args.out!r} exists; remove it or choose another directory")
    strategy = Strategy(depth=args.depth)
    temperatures = [] if args.no_measure else numbers("--temperatures", args.temperatures)
    target = open_target(args)
    prompts = find_prompts(args, target) if temperatures else None
    tokens = prompts.tokens if prompts else sample_prompts(target)
    loaded = read_drafter(args.drafter, target, print, None)
    if loaded is None:
        raise ConfigError(
            f"{args.drafter}: it has no EAGLE layer to export; a small model is a Hugging Face "
            "directory already"
        )
    check(layout, loaded.layer.config)
    dtype = DTYPES[args.export_dtype] if args.export_dtype else loaded.layer.dtype
    loaded = rounded(loaded, dtype)
    temporary = out.with_name(f".new-{out.name}-{os.getpid()}")
    try:
        write_layout(temporary, layout, loaded, target, verifier=_path(target), depth=args.depth)
        found = self_check(temporary, loaded, target, tokens, _REPLAYED_TOKENS)
        figures: list[Figure] = []
        for temperature in temperatures if prompts else ():
            workload = decode(target, tokens, temperature, args.max_tokens)
            figures += _figures(loaded, layout, workload, strategy)
        card = Card(
            name=out.name,
            layout=layout,
            base_model=args.base_model or _path(target),
            license=args.license,
            depth=args.depth,
            loaded=loaded,
            target=target,
            target_name=args.target,
            score_error=found.score_error,
            replayed=found.num_verified,
            prompts=prompts.source if prompts else "",
            num_prompts=len(tokens),
            figures=figures,
        )
        write_card(temporary / "README.md", card)
        temporary.rename(out)
    except CheckpointError:  # also an OSError, and has its own message
        raise
    except UNWRITABLE as error:
        raise CheckpointError(
            f"the drafter cannot be written to {out}: {error}; free space or choose another path"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _print_result(out, layout, found, figures)
    return 0


def write_layout(
    path: Path,
    layout: Layout,
    loaded: LoadedDrafter,
    target: Target,
    *,
    verifier: str,
    depth: int,
) -> None:
    """Write config.json and the tensors of a drafter, in its dtype, into a new directory."""
    path.mkdir(parents=True)
    config, dtype = loaded.layer.config, loaded.layer.dtype
    content = to_config(layout, config, dtype, verifier=verifier, depth=depth)
    content[SECTION] |= {"target": asdict(loaded.trained_on), "training": asdict(loaded.training)}
    tensors = to_tensors(layout, loaded.layer, target.model, loaded.draft_ids, loaded.head, dtype)
    content[SECTION]["digest"] = tensors_digest(tensors)
    write_tensors(tensors, path)
    (path / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def rounded(loaded: LoadedDrafter, dtype: torch.dtype) -> LoadedDrafter:
    """Fold the scale and convert to the dtype of the files, in place for the layer.

    Layouts of EAGLE-1 have no reduced vocabulary, so such a drafter gets the whole one.
    """
    loaded.layer.fold()
    loaded.layer.to(dtype)
    config = loaded.layer.config
    if config.recipe == "eagle1" and loaded.draft_ids is not None:
        loaded.layer.config = replace(config, draft_vocab_size=0)
        loaded = replace(loaded, draft_ids=None)
    head = None if loaded.head is None else loaded.head.to(dtype)
    return replace(loaded, head=head)


def self_check(
    path: Path,
    loaded: LoadedDrafter,
    target: Target,
    prompts: Sequence[tuple[int, ...]],
    num_tokens: int,
) -> CheckResult:
    """Compare the files with the drafter on `num_tokens` tokens; CheckpointError if they differ."""
    greedy = sampling_of(target, 0.0, num_tokens)
    completion = complete(target, prompts[:1], greedy, None)[0][0].tokens
    error, count = _score_error(path, loaded, target.model, (*prompts[0], *completion))
    if not error <= _TOLERANCE:
        raise CheckpointError(
            f"{path}: the scores of the exported files differ from the drafter's (by {error:.1e}); "
            "nothing is exported. This is a defect of longtail: please report it"
        )
    again = load_published(path, target.name, target.model, target.tokenizer)
    before, after = (_replay(each, target, prompts, num_tokens) for each in (loaded, again))
    if before != after:
        raise CheckpointError(
            f"{path}: the acceptance of the exported files is {after} (greedy, with noise), the "
            f"drafter's {before}; nothing is exported. This is a defect of longtail: please report "
            "it"
        )
    total = AcceptLength(
        num_verified=sum(each.num_verified for each in before),
        num_accepted=sum(each.num_accepted for each in before),
    )
    return CheckResult(
        score_error=error,
        num_scores=count,
        accept_len=total.mean,
        num_verified=total.num_verified,
    )


def copy_of(loaded: LoadedDrafter) -> LoadedDrafter:
    """Return the drafter with a copy of its layer, since drafting packs the layer."""
    layer = EagleLayer(loaded.layer.config).to(loaded.layer.device, loaded.layer.dtype)
    layer.load_state_dict(loaded.layer.state_dict())
    return replace(loaded, layer=layer)


def _score_error(
    path: Path, loaded: LoadedDrafter, target: Transformer, tokens: Sequence[int]
) -> tuple[float, int]:
    """Return the relative error of both readers' scores on a text, and their number; float64."""
    fields = read_fields(path).everything()
    layer = copy_of(loaded).layer.double().cpu()
    config = layer.config = replace(layer.config, window=_window_of(fields))
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
        if config.recipe == "eagle3":  # it is in the files, rounded like the rest
            rows = rows.to(loaded.layer.dtype)
        mine = output.scored @ rows.double().T
    if loaded.draft_ids is not None:
        theirs = theirs[:, loaded.draft_ids.cpu()]
    return float((mine - theirs).abs().max() / mine.abs().max()), mine.numel()


def _window_of(fields: Mapping[str, Any]) -> int:
    layer = fields.get("transformer_layer_config", fields)
    return int(layer.get("sliding_window") or 0) if "layer_types" in layer else 0


def _replay(
    loaded: LoadedDrafter, target: Target, prompts: Sequence[tuple[int, ...]], num_tokens: int
) -> list[AcceptLength]:
    """Draft chains for a few prompts, greedily and with noise."""
    found = []
    for temperature in (0.0, 1.0):
        sampling = sampling_of(target, temperature, num_tokens)
        fixed = Speculation.fixed(at_work(copy_of(loaded), target), Strategy(depth=4))
        found.append(complete(target, prompts[:_REPLAYED], sampling, fixed)[1].overall)
    return found


def _figures(
    loaded: LoadedDrafter, layout: Layout, workload: Workload, strategy: Strategy
) -> Iterator[Figure]:
    """Measure with the trained window, and with that of the engine if it differs."""
    config = loaded.layer.config
    for window in dict.fromkeys((config.window, engine_window(layout, config))):
        drafter = at_work(copy_of(loaded), workload.target, window=window)
        yield Figure(window=window, measured=measure(workload, drafter, strategy))


def _path(target: Target) -> str:
    """Return the name from which an engine loads the model: of a run, its newest checkpoint."""
    if target.name == TINY_REASONER:
        return target.name
    return repository_of(target.name) or str(target.directory)


def _print_result(out: Path, layout: Layout, found: CheckResult, figures: Sequence[Figure]) -> None:
    print(
        f"check: an independent reader computes the same {found.num_scores:,} scores (largest "
        f"relative difference {found.score_error:.1e})\nreplay: {found.num_verified} drafts, "
        f"accept length {found.accept_len:.3f} before and after the export"
    )
    for each in figures:
        print(each.line())
    if not figures:
        print(f"acceptance: {NOT_MEASURED}")
    print(f"drafter for {layout}: {out}")
    result = {
        "out": str(out),
        "layout": layout,
        "score_error": found.score_error,
        "replayed": found.num_verified,
        "figures": [each.as_json() for each in figures],
    }
    print(json.dumps(result))
