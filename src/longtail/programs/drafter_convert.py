"""Published drafters: import one for a target, and export in the layout that vLLM reads."""

import json
from pathlib import Path

from longtail.assembly.drafters import check_names, read_drafter
from longtail.assembly.engine import open_model
from longtail.config.command_options import ExportOptions, ImportOptions
from longtail.drafter.formats.eagle_export import export_drafter
from longtail.drafter.formats.eagle_import import is_published, load_published
from longtail.errors import ConfigError
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.programs.drafter_eval import default_target
from longtail.run.base_model import model_directory
from longtail.system.device import DTYPES, set_threads


def run_import(args: ImportOptions) -> int:
    """Run `longtail drafter import`."""
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
    config = loaded.eagle.config
    reads = f", reads the inputs of layers {list(config.layers)}" if config.layers else ""
    print(
        f"{config.recipe}{reads}; window {config.window or 'unbounded'}; draft vocabulary "
        f"{config.draft_vocab_size or config.target.vocab_size:,} of {config.target.vocab_size:,}; "
        + ("its own head" if loaded.head is not None else "the target's head")
    )
    print(f"drafter: {out}\nto measure it: longtail drafter eval {out} --target {args.target}")
    return 0


def run_export(args: ExportOptions) -> int:
    """Run `longtail drafter export`."""
    set_threads(args.threads)
    check_names(args.drafter, field="DRAFTER")
    name = args.target or default_target(args.drafter)
    directory = model_directory(name, field="--target")
    target = open_model(name, directory, load_tokenizer(directory))
    loaded = read_drafter(args.drafter, target, None)
    if loaded is None:
        raise ConfigError(f"{args.drafter}: it has no weights to export")
    dtype = DTYPES[args.export_dtype] if args.export_dtype else loaded.layer.dtype
    loaded = export_drafter(Path(args.out), loaded, target.model, dtype)
    options = {"method": loaded.kind.vllm, "model": args.out, "num_speculative_tokens": 4}
    print(f"{loaded.layer.config.recipe} drafter: {args.out}")
    print(f"vllm serve {target.directory} --speculative-config '{json.dumps(options)}'")
    return 0
