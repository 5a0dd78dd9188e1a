"""The optimizer: schedule, clipping, Muon for matrices, refusal of NaN, state."""

import pytest
import torch
from torch import nn

from longtail.config.sections import OptimizerSection
from longtail.errors import CheckpointError, NonFiniteError
from longtail.rl import muon
from longtail.rl.optim import Optimizer, scheduled_rate
from support.tiny_models import tiny_model


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


@pytest.mark.parametrize("most", [1e9, 0.5])
def test_the_first_update_is_adamw_by_hand_of_gradients_clipped_by_their_global_norm(most):
    net, norm = module(), (4 * 4.0 + 2 * 9.0) ** 0.5
    settings = OptimizerSection(learning_rate=0.1, weight_decay=0.5, eps=1.0, max_grad_norm=most)
    optimizer, share = Optimizer(net.named_parameters(), settings), min(1.0, most / norm)
    give_gradients(net, weight=2.0, bias=-3.0)
    update = optimizer.update(0)
    # After one step the bias-corrected moments are g and g^2: the update is lr g / (|g| + eps).
    # Only the matrix decays.
    moves = [0.1 * size * share / (size * share + 1) for size in (2.0, 3.0)]
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (1 - 0.1 * 0.5) - moves[0]
    torch.testing.assert_close(net.weight.detach(), weight)
    torch.testing.assert_close(net.bias.detach(), torch.tensor([5.0, 6.0]) + moves[1])
    assert update.grad_norm == pytest.approx(norm)
    assert update.learning_rate == 0.1
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_norm_that_overflows_is_refused_though_every_entry_is_finite():
    net = module()
    optimizer = Optimizer(net.named_parameters(), OptimizerSection())
    give_gradients(net, 3e38, 3e38)
    with pytest.raises(NonFiniteError, match="norm overflows"):
        optimizer.update(0)


def drawn(net: nn.Module, seed: int) -> nn.Module:
    """Give random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return net


def in_layers(net: nn.Module) -> list[str]:
    return [name for name, p in net.named_parameters() if "layers." in name and p.dim() == 2]


@pytest.mark.parametrize(("in_hardware", "tolerance"), [(True, 0.0), (False, 0.02)])
def test_matrices_move_as_under_pytorchs_muon_and_the_rest_as_alone(
    in_hardware, tolerance, monkeypatch
):
    monkeypatch.setattr(muon, "multiplies_bfloat16", lambda device: in_hardware)
    settings = OptimizerSection(learning_rate=0.01, schedule="constant", weight_decay=0.1)
    ours, theirs, names = tiny_model(), tiny_model(), in_layers(tiny_model())
    optimizer = Optimizer(ours.named_parameters(), settings, matrices=names, matrix_rate=0.5)
    matrices = [theirs.get_parameter(name) for name in names]
    expected = torch.optim.Muon(matrices, lr=0.5, weight_decay=0.1)
    adamw = Optimizer(
        [each for each in theirs.named_parameters() if each[0] not in names], settings
    )
    before = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    for step in range(3):
        drawn(ours, step)
        gradients = [p.grad.flatten() for p in drawn(theirs, step).parameters()]
        norm = float(torch.cat(gradients).double().norm())
        assert optimizer.update(step).grad_norm == pytest.approx(norm)
        expected.step()
        adamw.update(step)
    for name, parameter in theirs.named_parameters():
        apart = (ours.get_parameter(name) - parameter).norm()
        most = tolerance * (parameter - before[name]).norm() if name in names else 0.0
        assert apart <= most, name


@pytest.mark.parametrize("name", ["layers.1.feed_forward.down.weight", "norm.weight"])
def test_a_gradient_that_is_not_finite_changes_nothing(name):
    model, twin = drawn(tiny_model(), 0), tiny_model()
    optimizer = Optimizer(
        model.named_parameters(), OptimizerSection(), matrices=in_layers(model), matrix_rate=0.02
    )
    model.get_parameter(name).grad.flatten()[0] = float("nan")
    with pytest.raises(NonFiniteError, match=f"step 4: the gradient of {name} is not finite"):
        optimizer.update(4)
    assert all(torch.equal(p, twin.get_parameter(n)) for n, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("matrices", "odd"), [((), "exp_avg/weight"), (("weight",), "momentum/weight")]
)
def test_a_restored_optimizer_goes_on_alike_and_the_state_of_another_model_is_refused(
    matrices, odd
):
    def optimizer(net: nn.Module) -> Optimizer:
        named = net.named_parameters()
        return Optimizer(named, OptimizerSection(), matrices=matrices, matrix_rate=0.1)

    nets = module(), module()
    whole, restored = map(optimizer, nets)
    drawn(nets[0], 1)
    whole.update(0)
    restored.load(whole.tensors())
    nets[1].load_state_dict(nets[0].state_dict())
    for net, each in zip(nets, (whole, restored), strict=True):
        drawn(net, 2)
        each.update(1)
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))
    state = whole.tensors()
    lacking = {name: moment for name, moment in state.items() if name != odd}
    for net, given in ((nn.Linear(3, 2), state), (module(), lacking)):
        with pytest.raises(CheckpointError, match=f"{odd} is missing or misshapen"):
            optimizer(net).load(given)
    with pytest.raises(CheckpointError, match="exp_avg/more is of none of its parameters"):
        whole.load({**state, "exp_avg/more": torch.zeros(2)})
    assert all(map(torch.equal, whole.tensors().values(), state.values()))
