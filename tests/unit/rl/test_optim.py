"""The optimizer: schedule, clipping, refusal of NaN, state."""

import pytest
import torch
from torch import nn

from longtail.config.sections import OptimizerSection
from longtail.errors import CheckpointError, NonFiniteError
from longtail.rl.optim import Optimizer, scheduled_rate


def module() -> nn.Module:
    """A matrix, a vector, both of known values."""
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        net.bias.copy_(torch.tensor([5.0, 6.0]))
    return net


def give_gradients(net: nn.Module, weight: float, bias: float) -> None:
    for name, parameter in net.named_parameters():
        parameter.grad = torch.full_like(parameter, weight if name == "weight" else bias)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535533905932737, 0.5, 0.1464466094067262, 0.0]),
    ],
)
def test_the_rate_warms_up_and_then_follows_its_schedule(schedule, rates):
    settings = OptimizerSection(learning_rate=1.0, schedule=schedule, warmup_steps=2)
    found = [scheduled_rate(step, settings, 6) for step in range(7)]
    assert found == pytest.approx(rates, abs=1e-12)
    if schedule == "constant":
        assert scheduled_rate(10**6, settings) == 1.0, "the length of the run is not needed"


def test_the_first_update_is_adamw_by_hand():
    net = module()
    settings = OptimizerSection(learning_rate=0.1, weight_decay=0.5, eps=1.0, max_grad_norm=1e9)
    optimizer = Optimizer(net.named_parameters(), settings)
    give_gradients(net, weight=2.0, bias=-3.0)
    update = optimizer.update(0)
    # After one step the bias-corrected moments are g and g^2: the update is lr g / (|g| + eps).
    # Only the matrix decays.
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (1 - 0.1 * 0.5) - 0.1 * 2 / 3
    torch.testing.assert_close(net.weight.detach(), weight)
    torch.testing.assert_close(net.bias.detach(), torch.tensor([5.0, 6.0]) + 0.1 * 3 / 4)
    assert update.grad_norm == pytest.approx((4 * 4.0 + 2 * 9.0) ** 0.5)
    assert update.learning_rate == 0.1
    assert all(parameter.grad is None for parameter in net.parameters())


def test_gradients_are_clipped_by_their_global_norm():
    net = module()
    before = net.bias.detach().clone()
    optimizer = Optimizer(
        net.named_parameters(), OptimizerSection(learning_rate=1.0, eps=1.0, max_grad_norm=0.5)
    )
    give_gradients(net, weight=0.0, bias=3.0)
    update = optimizer.update(0)
    norm = (2 * 9.0) ** 0.5
    clipped = 3.0 * 0.5 / norm
    assert update.grad_norm == pytest.approx(norm)
    torch.testing.assert_close(net.bias.detach(), before - clipped / (clipped + 1.0))


def test_a_norm_that_overflows_is_refused_though_every_entry_is_finite():
    net = module()
    optimizer = Optimizer(net.named_parameters(), OptimizerSection())
    give_gradients(net, 3e38, 3e38)
    with pytest.raises(NonFiniteError, match="norm overflows"):
        optimizer.update(0)


def test_the_state_of_another_model_is_refused():
    net, other = module(), nn.Linear(3, 2)
    optimizer = Optimizer(net.named_parameters(), OptimizerSection())
    give_gradients(net, 1.0, 1.0)
    optimizer.update(0)
    state = optimizer.tensors()
    with pytest.raises(CheckpointError, match=r"weight is \(2, 3\), its moments are \(2, 2\)"):
        Optimizer(other.named_parameters(), OptimizerSection()).load(state)
    del state["exp_avg/bias"]
    with pytest.raises(CheckpointError, match="'exp_avg/bias' is on one side only"):
        Optimizer(net.named_parameters(), OptimizerSection()).load(state)
