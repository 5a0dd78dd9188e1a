"""New drafter weights are read, checked and loaded without touching the target."""

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from longtail.cluster.work.drafter_publisher import DrafterState
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.drafter.formats.checkpoint import LoadedDrafter, TargetIdentity, TrainingRecord
from longtail.drafter.formats.layouts import SECTION, layer_tensors
from longtail.drafter.weights import copy_parameters, with_prefix
from longtail.errors import ConfigError
from longtail.model.hf.weights import write_tensors
from longtail.run.drafter_store import DrafterStore
from longtail.vllm import adopt
from longtail.vllm.weights import read_weights
from support.tiny_models import tiny_config
from support.vllm_releases import module

IDS = torch.tensor([1, 3, 4, 9])


def drafter(seed, recipe="eagle3", ids=IDS):
    """Return a drafter with random weights."""
    config = EagleConfig(
        recipe=recipe,
        target=tiny_config(),
        layers=(0, 1) if recipe == "eagle3" else (),
        draft_vocab_size=0 if ids is None else len(ids),
        feature_scale=0.5,
    )
    layer = EagleLayer(config)
    layer.initialize(torch.Generator().manual_seed(seed))
    return LoadedDrafter(
        layer=layer,
        draft_ids=ids,
        trained_on=TargetIdentity(name="tiny", tokenizer="t", weights="w"),
        training=TrainingRecord(steps=1, tokens=1, unroll_steps=1),
    )


def export(path, loaded, head, **section):
    """Write a drafter as vLLM loads it."""
    path.mkdir()
    tensors = layer_tensors(loaded.layer, torch.float32)
    if loaded.layer.config.recipe == "eagle3":
        tensors |= {"lm_head.weight": head[loaded.draft_ids].clone()}
        tensors |= {"d2t": loaded.draft_ids - torch.arange(len(loaded.draft_ids))}
    write_tensors(tensors, path)
    (path / "config.json").write_text(json.dumps({SECTION: section}))
    return tensors


@pytest.fixture
def place(tmp_path):
    """A target's directory, and a drafter in vLLM's layout that an engine runs."""
    config = tiny_config()
    generator = torch.Generator().manual_seed(7)
    head = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    (tmp_path / "target").mkdir()
    write_tensors({"lm_head.weight": head}, tmp_path / "target")
    export(tmp_path / "running", drafter(1), head)
    return SimpleNamespace(root=tmp_path, head=head)


def read(place, name):
    return read_weights(place.root / name, place.root / "running", place.root / "target")


def test_drafters_are_read_in_either_layout_and_an_export_with_its_digest(place):
    loaded = drafter(2)
    loaded.save(place.root / "own")
    expected, found = layer_tensors(loaded.layer, torch.float32), read(place, "own").tensors
    assert found.keys() == expected.keys()  # the vocabulary is the one in the engine
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    written = export(place.root / "new", loaded, place.head)
    found = read(place, "new")
    assert found.tensors.keys() == written.keys()
    assert (found.version, len(found.digest)) == (None, 64)
    (place.root / "new" / "config.json").write_text(json.dumps({SECTION: {"digest": "ab"}}))
    with pytest.raises(ConfigError, match=r"config\.json says ab: copy it again"):
        read(place, "new")


def test_the_newest_step_of_a_run_is_read_with_its_version_and_vocabulary(place):
    first, newest = drafter(4), drafter(5, ids=IDS + 1)
    first.save(place.root / "run" / "drafter" / "initial")
    assert read(place, "run/drafter").version == 0
    store = DrafterStore(place.root / "run" / "drafter")
    tensors = with_prefix("drafter/", copy_parameters(newest.layer, newest.draft_ids))
    store.save(4, DrafterState(tensors=tensors, numbers={"version": 6}))
    for name in ("run", "run/drafter", "run/drafter/step_000004"):
        found = read(place, name)
        assert found.version == 6
        assert torch.equal(found.tensors["d2t"], IDS + 1 - torch.arange(4))
        assert torch.equal(found.tensors["lm_head.weight"], place.head[IDS + 1])
        assert torch.equal(found.tensors["fc.weight"], newest.layer.fc.weight.detach() * 0.5)


def test_what_does_not_fit_is_refused_by_name(place):
    export(place.root / "eagle1", drafter(1, "eagle1", None), place.head)
    export(place.root / "more", drafter(1, ids=torch.arange(6)), place.head)
    (place.root / "empty").mkdir()
    for name, said in (
        ("eagle1", "the drafter of the engine"),
        ("more", "d2t has shape"),
        ("empty", "holds no weights"),
    ):
        with pytest.raises(ConfigError, match=said):
            read(place, name)


class Draft(nn.Module):
    """A drafter of vLLM: its own layer, and an embedding and a head that are the target's."""

    def __init__(self, target):
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        self.embed_tokens, self.lm_head = target["embed_tokens"], target["lm_head"]

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def test_the_target_is_out_of_reach_while_weights_are_loaded(monkeypatch):
    target = nn.ModuleDict({"embed_tokens": nn.Embedding(4, 2), "lm_head": nn.Linear(2, 4)})
    draft, seen = Draft(target), []

    def initialize_layerwise_reload(model):
        seen.append([type(each).__name__ for each in model.children()])

    def finalize_layerwise_processing(model, model_config):
        seen.append(model_config)

    functions = (initialize_layerwise_reload, finalize_layerwise_processing)
    reload = module(adopt._RELOAD, **{each.__name__: each for each in functions})
    config = module("vllm.config", set_current_vllm_config=lambda _: nullcontext())
    for each in (reload, config):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    kept = target["lm_head"].weight.detach().clone()
    speculation = SimpleNamespace(draft_model_config="of the drafter")
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=speculation),
        model_runner=SimpleNamespace(get_draft_model=lambda: draft, get_model=lambda: target),
    )
    adopt.load_drafter(worker, {"fc.weight": torch.ones(2, 2), "lm_head.weight": torch.ones(4, 2)})
    assert seen == [["Linear", "Identity", "Identity"], "of the drafter"]
    assert torch.equal(draft.fc.weight.detach(), torch.ones(2, 2))
    assert torch.equal(target["lm_head"].weight.detach(), kept)
    assert (draft.lm_head, draft.embed_tokens) == (target["lm_head"], target["embed_tokens"])


def test_an_engine_without_a_drafter_is_named():
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=None), model_runner=SimpleNamespace()
    )
    with pytest.raises(ConfigError, match="start it with a speculative_config"):
        adopt.adopt(worker, "anywhere")


def test_all_workers_answer_with_one_adoption():
    answers = [
        {"digest": "d", "seconds": seconds, "version": 3, "source": "s"} for seconds in (0.1, 0.2)
    ]
    llm = SimpleNamespace(collective_rpc=lambda method, args: answers)
    found = adopt.adopt_drafter(llm, "s")
    assert (found.seconds, found.version) == (0.2, 3)
