"""The learned drafter in a worker: its start, and what it notices of new weights."""

from types import SimpleNamespace

import pytest
import torch

from longtail.errors import ConfigError
from longtail.vllm import learned_worker
from longtail.vllm.learned_v1 import LearnedProposer
from longtail.vllm.learned_worker import _execute_model, _load_model, open_learned
from support import toy
from unit.vllm.test_ridge import DEPTH, model


def config(**settings: object) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config={"longtail": {"drafter": "learned", **settings}},
        model_config=SimpleNamespace(dtype=torch.float32, max_model_len=96),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        speculative_config=SimpleNamespace(num_speculative_tokens=DEPTH),
    )


def test_a_drafter_of_another_kind_is_refused_as_a_beginning() -> None:
    wanted = config(begin=str(toy.DRAFTERS["eagle1"]))
    with pytest.raises(ConfigError, match="it is eagle1, and a learned drafter is ridge"):
        open_learned(model(), wanted, LearnedProposer().draw)


def test_weights_that_differ_are_noticed_before_the_next_step() -> None:
    """In place, before a step of new requests alone or after a pause; loaded, at once."""
    weights = torch.nn.ModuleList([torch.nn.Linear(3, 300), torch.nn.LayerNorm(3)])
    target = model(parameters=weights.parameters)
    learned = open_learned(target, config(), LearnedProposer().draw)
    runner = SimpleNamespace(get_model=lambda: target)
    worker = SimpleNamespace(model_runner=runner, longtail_learned=learned)

    def is_noticed(new: int, *changed: int, loads: int = 0, pauses: bool = False) -> bool:
        """Execute a step with `new` of one request, after changes of these modules."""
        with torch.no_grad():
            for place in changed:
                next(weights[place].parameters()).view(-1)[-1].add_(1e-3)
        for _ in range(loads):
            target.load_weights(weights=[])
        output = SimpleNamespace(num_scheduled_tokens={"r": 1}, scheduled_new_reqs=["r"][:new])
        output.longtail_has_paused = pauses
        _execute_model(lambda *_: None, worker, output)
        noticed, learned.has_changed = learned.has_changed, False
        return noticed

    assert not is_noticed(1)
    assert not is_noticed(0, 0)  # requests run
    assert is_noticed(1)
    assert is_noticed(1, 1)
    assert not is_noticed(1)
    assert is_noticed(0, 1, 0, loads=2)
    assert not is_noticed(1)
    assert is_noticed(0, 1, pauses=True)  # as prime-rl pauses, with requests
    assert not is_noticed(0, pauses=True)


def test_weights_whose_load_is_not_ended_are_looked_at_afterwards() -> None:
    """Packed weights are without data from a trainer's load to the next forward pass."""
    weights = torch.nn.ModuleList([torch.nn.Linear(3, 300), torch.nn.LayerNorm(3)])
    target = model(parameters=weights.parameters)
    learned = open_learned(target, config(), LearnedProposer().draw)
    target.load_weights([])
    whole, weights[0] = weights[0], torch.nn.Linear(3, 300, device="meta")
    learned.look(target)
    assert learned.has_changed
    weights[0], learned.has_changed = whole, False
    learned.look(target)
    assert not learned.has_changed


def test_the_drafter_is_opened_after_the_weights_outside_of_their_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What lies in vLLM's pool of weights is lost when it sleeps deeply, as TRL and verl let it."""
    order = list[str]()
    drafter = SimpleNamespace(learned=None, draw=None)
    runner = SimpleNamespace(get_model=lambda: "target", drafter=drafter)
    worker = SimpleNamespace(model_runner=runner, vllm_config=None)
    monkeypatch.setattr(learned_worker, "open_learned", lambda model, *_: order.append(model))
    _load_model(lambda _: order.append("weights"), worker)
    assert order == ["weights", "target"]
