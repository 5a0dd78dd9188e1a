import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from end_to_end.workshop import Workshop, write_lines
from longtail.assembly import trainer
from longtail.assembly.plan import RunPlan, plan_run
from longtail.assembly.prompts import load_prompts
from longtail.assembly.trainer import TrainerComponents, assemble
from longtail.assembly.worker import build_components, build_worker
from longtail.cluster.workers.components import WorkerComponents
from longtail.cluster.workers.processes import Place
from longtail.cluster.workers.worker import Worker
from longtail.config.rl import RunConfig, load
from longtail.engine.request import EngineLimits
from longtail.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from longtail.model.hf.model import save_model
from longtail.run.base_model import find_base
from support.tiny_models import tiny_model

DRAFTERS = ("fresh", "history")


def _config(workshop: Workshop, *words: str) -> RunConfig:
    return load(None, workshop.words("run", *words)[1:])


def _assemble(workshop: Workshop, *words: str) -> TrainerComponents:
    config = _config(workshop, *words)
    prompts = partial(load_prompts, config, check=lambda rows: [None] * len(rows))
    return assemble(config, workshop.model, None, prompts)


def _components(workshop: Workshop, *words: str) -> WorkerComponents:
    config = _config(workshop, *words)
    limits = EngineLimits(max_running=4, max_step_tokens=64, max_len=64)
    return build_components(plan_run(config, workshop.model), DRAFTERS, limits, Place())


def test_the_configuration_reaches_every_part(workshop, monkeypatch):
    made = list[EngineLimits]()

    def noted(plan: RunPlan, names: list[str], limits: EngineLimits, place: Place) -> Worker:
        made.append(limits)
        return build_worker(plan, names, limits, place)

    monkeypatch.setattr(trainer, "build_worker", noted)
    words = (
        "--rollout.top_p=0.9", "--rollout.temperature=0.7", "--rollout.stop=END,<user>",
        "--rollout.kv_tokens=0", "--rollout.max_running=3", "--rollout.dtype=float64",
        "--learner.dtype=float32",
    )  # fmt: skip
    parts, components = _assemble(workshop, *words), _components(workshop, *words)
    assert parts.sampling.temperature == 0.7
    assert parts.sampling.top_p == 0.9
    assert parts.sampling.max_tokens == 16
    assert parts.sampling.stop == ("END", "<user>")
    assert parts.sampling.stop_token_ids == (*components.tokenizer.eos_ids, 3) == (1, 3)
    assert components.policy.dtype == torch.float32
    assert components.generator.model.dtype == torch.float64
    # The longest prompt has 9 tokens in the chat template, and 16 more are generated.
    assert [(each.max_running, each.max_len, each.kv_tokens) for each in made] == [(3, 25, 0)]
    assert len(parts.source.take(8)) == 8
    assert [prompt.prompt_id for prompt in parts.heldout] == [f"prompts/{i}" for i in range(8, 12)]
    assert parts.num_parameters == sum(p.numel() for p in components.policy.parameters())


def test_held_out_problems_may_come_from_another_source(workshop, tmp_path):
    other = tmp_path / "other.jsonl"
    write_lines(other, *({"prompt": f"{i}"} for i in range(9)))
    parts = _assemble(workshop, f"--data.heldout={other}", "--data.heldout_size=2")
    assert [prompt.prompt_id for prompt in parts.heldout] == ["other/0", "other/1"]
    first_epoch = {each.prompt.prompt_id for each in parts.source.take(12)}
    assert first_epoch == {f"prompts/{i}" for i in range(12)}
    assert _assemble(workshop, f"--data.heldout={other}", "--data.heldout_size=0").heldout == ()
    other.write_text("")
    with pytest.raises(DataError, match=r"data\.heldout = .* holds no rows"):
        _assemble(workshop, f"--data.heldout={other}")


def test_room_is_checked_against_the_longest_prompt_there_is_not_the_limit(workshop):
    # Prompts of 8 or 9 tokens; data.max_prompt_len is 512, as many as the model has positions.
    assert _assemble(workshop, "--rollout.max_tokens=503")
    with pytest.raises(ConfigError, match="503 of its 512 positions left"):
        _assemble(workshop, "--rollout.max_tokens=504")


def test_broken_weights_are_not_published(workshop):
    components = _components(workshop)
    with torch.no_grad():
        components.policy.layers[1].feed_forward.down.weight[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.down_proj\.weight .*version 0"):
        Worker(components).publish()


def test_a_checkpoint_of_another_model_is_refused(workshop, tmp_path):
    other = tmp_path / "other"
    components = _components(workshop)
    save_model(tiny_model("llama"), other, eos_ids=components.tokenizer.eos_ids)
    components.tokenizer.save(other)
    with pytest.raises(CheckpointError, match="another model"):
        Worker(components).restore_saved(other, components.learner.state())


def test_shards_are_refused_where_pytorch_is_too_old(workshop, monkeypatch):
    words = ("--cluster.workers=2", "--learner.sharding=full")
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.12.1+cpu"))
    with pytest.raises(ConfigError, match=r"learner.sharding = 'full' needs PyTorch 2.13 .* 2.12"):
        _assemble(workshop, *words)


def test_a_worker_that_is_started_later_reads_the_same_base(workshop, tmp_path):
    words = ("--learner.lora.rank=2", "--cluster.workers=2")
    model = Path(shutil.copytree(workshop.model, tmp_path / "model"))
    config = _config(workshop, *words, f"--model.path={model}")
    plan = plan_run(config, *find_base(config, None))
    limits = EngineLimits(max_running=4, max_step_tokens=64, max_len=64)
    build_components(plan, DRAFTERS, limits, Place())
    save_model(tiny_model(seed=9), model)
    with pytest.raises(ConfigError, match=r"the adapters belong to the model that was in .*/model"):
        build_components(plan, DRAFTERS, limits, Place())
