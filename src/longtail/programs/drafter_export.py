"""`longtail drafter export`: write a drafter in the Hugging Face layout that vLLM reads."""

import argparse
import json
from pathlib import Path

from longtail.assembly.drafters import check_names, read_drafter
from longtail.assembly.engine import open_model
from longtail.assembly.models import model_directory
from longtail.drafter.formats.published import export_drafter
from longtail.errors import ConfigError
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.programs.drafter_eval import default_target
from longtail.system.device import DTYPES, set_threads


def run(args: argparse.Namespace) -> int:
    """Run `longtail drafter export`; the options are in `cli.options`."""
    set_threads(args.threads)
    check_names(args.drafter, field="DRAFTER")
    name = args.target or default_target(args.drafter)
    directory = model_directory(name, field="--target")
    target = open_model(name, directory, load_tokenizer(directory))
    loaded = read_drafter(args.drafter, target, print, None)
    if loaded is None:
        raise ConfigError(f"{args.drafter}: it has no EAGLE layer to export")
    dtype = DTYPES[args.export_dtype] if args.export_dtype else loaded.layer.dtype
    loaded = export_drafter(Path(args.out), loaded, target.model, target.tokenizer, dtype)
    recipe = loaded.layer.config.recipe
    options = {
        "method": "eagle" if recipe == "eagle1" else recipe,
        "model": args.out,
        "num_speculative_tokens": 4,
    }
    print(f"{recipe} drafter: {args.out}; the files were read back and hold the same tensors")
    print(f"vllm serve {target.directory} --speculative-config '{json.dumps(options)}'")
    return 0
