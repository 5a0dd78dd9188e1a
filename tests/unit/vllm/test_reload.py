"""New drafter weights are loaded without touching the target."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import nn

from longtail.vllm import reload
from support.vllm_releases import module


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
    layerwise = module(reload.RELOAD, **{each.__name__: each for each in functions})
    config = module("vllm.config", set_current_vllm_config=lambda _: nullcontext())
    for each in (layerwise, config):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    kept = target["lm_head"].weight.detach().clone()
    speculation = SimpleNamespace(draft_model_config="of the drafter")
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=speculation),
        model_runner=SimpleNamespace(get_draft_model=lambda: draft, get_model=lambda: target),
    )
    reload.load_drafter(worker, {"fc.weight": torch.ones(2, 2), "lm_head.weight": torch.ones(4, 2)})
    assert seen == [["Linear", "Identity", "Identity"], "of the drafter"]
    assert torch.equal(draft.fc.weight.detach(), torch.ones(2, 2))
    assert torch.equal(target["lm_head"].weight.detach(), kept)
    assert (draft.lm_head, draft.embed_tokens) == (target["lm_head"], target["embed_tokens"])
