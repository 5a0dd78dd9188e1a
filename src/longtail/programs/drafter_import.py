"""`longtail drafter import`: convert a published drafter to a drafter directory for one target."""

import argparse
from pathlib import Path

from longtail.assembly.engine import open_model
from longtail.assembly.models import model_directory
from longtail.drafter.formats.published import is_published, load_published
from longtail.errors import ConfigError
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.system.device import set_threads


def run(args: argparse.Namespace) -> int:
    """Run `longtail drafter import`; the options are in `cli.options`."""
    set_threads(args.threads)
    path, out = Path(args.directory), Path(args.out)
    if out.exists():
        raise ConfigError(f"--out = {args.out!r} exists; remove it or choose another directory")
    if not is_published(path):
        raise ConfigError(
            f"{path}: it holds no published drafter (the tensor fc.weight in model.safetensors is "
            "missing; pickles are never opened): download all files, as safetensors"
        )
    directory = model_directory(args.target, field="--target")
    tokenizer = load_tokenizer(directory)
    model = open_model(args.target, directory, tokenizer).model
    loaded = load_published(path, args.target, model, tokenizer, layer_ids=args.layer_ids)
    loaded.save(out)
    config = loaded.layer.config
    reads = f", reads the inputs of layers {list(config.layers)}" if config.layers else ""
    print(
        f"{config.recipe}{reads}; window {config.window or 'unbounded'}; draft vocabulary "
        f"{config.draft_vocab_size or config.target.vocab_size:,} of {config.target.vocab_size:,}; "
        + ("its own head" if loaded.head is not None else "the target's head")
    )
    print(f"drafter: {out}\nto measure it: longtail drafter eval {out} --target {args.target}")
    return 0
