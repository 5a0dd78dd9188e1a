"""`longtail merge`: writes the whole model of a run that trained adapters."""

from pathlib import Path

from longtail.config.command_options import MergeOptions
from longtail.config.rl import load
from longtail.errors import ConfigError
from longtail.model.hf.adapters import AdaptedModel
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.rl.optim import load_parameters
from longtail.rl.policy import open_policy
from longtail.run.base_model import find_base
from longtail.run.checkpoint import CONFIG_FILE, RunDirectory
from longtail.run.state_file import RUN_FORMAT
from longtail.system.files import replace_folder, writing


def run(args: MergeOptions) -> int:
    """Run `longtail merge`."""
    out, path = Path(args.out), Path(args.run)
    if out.exists():
        raise ConfigError(f"--out = {args.out!r} exists; remove it or choose another directory")
    latest = RunDirectory(path).load_latest("policy")
    if latest is None:
        raise ConfigError(f"{path}: it holds no run with a complete checkpoint; give one that does")
    config = load(path / CONFIG_FILE)
    if config.learner.lora is None:
        raise ConfigError(f"{path}: it trained all weights (no learner.lora); use {latest.policy}")
    if latest.run_format != RUN_FORMAT:
        raise ConfigError(
            f"{path}: another version of longtail wrote this run, which does not say what model "
            "its adapters belong to; merge it with that version"
        )
    directory, _ = find_base(config, latest.state["base"])
    policy = open_policy(directory, config, "cpu")
    assert isinstance(policy, AdaptedModel), "learner.lora is set"
    load_parameters(policy.trainable(), policy.read(latest.policy))
    tokenizer = load_tokenizer(latest.policy)

    def write(folder: Path) -> None:
        policy.save_merged(folder, tokenizer.eos_ids, tokenizer.bos_id)
        tokenizer.save(folder)

    with writing("the model", out):
        replace_folder(out, write)
    print(f"the model of step {latest.step} is in {out}")
    return 0
