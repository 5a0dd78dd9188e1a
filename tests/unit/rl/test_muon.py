"""Muon for the matrices of layers, AdamW for the rest: split, refusal, state."""

import pytest
import torch

from longtail.config.sections import OptimizerSection
from longtail.errors import CheckpointError, NonFiniteError
from longtail.rl import muon
from longtail.rl.muon import MuonOptimizer
from longtail.rl.optim import Optimizer
from support.tiny_models import tiny_model

SETTINGS = OptimizerSection(learning_rate=0.01, schedule="linear")
STEPS = 10


def give_gradients(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def parts_of(model):
    """Return the matrices inside layers, and the other parameters."""
    named = dict(model.named_parameters())
    matrices = {name: p for name, p in named.items() if "layers." in name and p.dim() == 2}
    return matrices, [(name, p) for name, p in named.items() if name not in matrices]


def muon_of(model, settings=SETTINGS, *, matrix_rate: float = 0.02) -> MuonOptimizer:
    parts = parts_of(model)
    return MuonOptimizer(*parts, settings, matrix_rate=matrix_rate, total_steps=STEPS)


def snapshot(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("in_hardware", "tolerance"), [(True, 0.0), (False, 0.02)])
def test_parameters_move_as_under_pytorchs_muon_and_our_adamw(in_hardware, tolerance, monkeypatch):
    monkeypatch.setattr(muon, "multiplies_bfloat16", lambda device: in_hardware)
    settings = SETTINGS.model_copy(update={"schedule": "constant", "weight_decay": 0.1})
    ours, theirs = tiny_model(), tiny_model()
    optimizer = muon_of(ours, settings, matrix_rate=0.5)
    matrices, others = parts_of(theirs)
    expected = torch.optim.Muon(matrices.values(), lr=0.5, weight_decay=0.1)
    adamw = Optimizer(others, settings, total_steps=STEPS)
    before = snapshot(theirs)
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        norm = torch.cat([p.grad.flatten() for p in theirs.parameters()]).double().norm()
        assert optimizer.update(step).grad_norm == pytest.approx(float(norm))
        expected.step()
        adamw.update(step)
    for name, parameter in snapshot(theirs).items():
        apart = (snapshot(ours)[name] - parameter).norm()
        most = tolerance * (parameter - before[name]).norm() if name in matrices else 0.0
        assert apart <= most, name


@pytest.mark.parametrize("name", ["layers.1.feed_forward.down.weight", "norm.weight"])
def test_a_gradient_that_is_not_finite_changes_nothing(name):
    model = tiny_model()
    optimizer = muon_of(model)
    give_gradients(model, 0)
    dict(model.named_parameters())[name].grad.flatten()[0] = float("nan")
    before = snapshot(model)
    with pytest.raises(NonFiniteError, match=r"step 4: the gradient of") as error:
        optimizer.update(4)
    assert name in str(error.value)
    assert all(torch.equal(before[n], now) for n, now in snapshot(model).items())
    assert all(p.grad is None for p in model.parameters())


def test_state_of_another_model_is_refused():
    model = tiny_model()
    optimizer = muon_of(model)
    give_gradients(model, 0)
    optimizer.update(0)
    state = optimizer.tensors()
    name = next(n for n in state if n.startswith("momentum/"))
    cut = {**state, name: state[name][:1]}
    with pytest.raises(CheckpointError, match="another model"):
        muon_of(tiny_model()).load(cut)
