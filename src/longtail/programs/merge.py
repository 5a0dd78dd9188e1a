"""The whole model of a run that trained adapters, the program behind `longtail merge`."""

import argparse
from pathlib import Path

from longtail.assembly.engine import model_directory
from longtail.config.rl import load
from longtail.errors import ConfigError
from longtail.model.hf.adapters import AdaptedModel
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.rl.optim import load_parameters
from longtail.rl.policy import open_policy
from longtail.run.checkpoint import CONFIG_FILE, RunDirectory


def run(args: argparse.Namespace) -> int:
    """Run `longtail merge`; the options are in `cli.options`."""
    out, path = Path(args.out), Path(args.run)
    if out.exists():
        raise ConfigError(f"--out = {args.out!r} exists; remove it or choose another directory")
    latest = RunDirectory(path).load_latest()
    if latest is None:
        raise ConfigError(f"{path}: it holds no run with a complete checkpoint; give one that does")
    config = load(path / CONFIG_FILE)
    if config.learner.lora is None:
        raise ConfigError(f"{path}: it trained all weights (no learner.lora); use {latest.policy}")
    policy = open_policy(model_directory(config.model.path), config, "cpu")
    assert isinstance(policy, AdaptedModel), "learner.lora is set"
    load_parameters(policy.trainable(), policy.read(latest.policy))
    tokenizer = load_tokenizer(latest.policy)
    out.mkdir(parents=True)
    policy.save_merged(out, tokenizer.eos_ids, tokenizer.bos_id)
    tokenizer.save(out)
    print(f"the model of step {latest.step} is in {out}")
    return 0
