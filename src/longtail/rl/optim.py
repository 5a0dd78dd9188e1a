"""AdamW and Muon with a schedule, a clipped norm, a check for NaN and a state that needs no pickle.

The learners of the policy, of supervised examples and of drafters use it. It knows parameters by
name; losses and batches are unknown here.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longtail.config.sections import OptimizerSection
from longtail.errors import CheckpointError, NonFiniteError
from longtail.rl import muon
from longtail.rl.collectives import SINGLE_PROCESS, ProcessGroup

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def scheduled_rate(step: int, settings: OptimizerSection, total_steps: int = 0) -> float:
    """Return the learning rate of step 0, 1, ...; linear and cosine reach 0 at `total_steps`.

    Example: learning_rate=1, linear, warmup_steps=2, total_steps=6:
             steps 0 1 2 3 4 5 -> 0.5 1 1 0.75 0.5 0.25
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    span = max(total_steps - settings.warmup_steps, 1)
    done = min((step - settings.warmup_steps) / span, 1.0)
    match settings.schedule:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1.0 - done
        case "cosine":
            factor = 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.learning_rate * factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Result of one optimizer update."""

    grad_norm: float
    """Global norm of the gradient before clipping."""
    learning_rate: float


@final
class Optimizer:
    """Updates parameters from their accumulated gradients.

    Invariant: an update happens whole or, on a gradient that is not finite, not at all. Every
    update frees the gradients, whether it is made or refused. If the parameters are shards, `group`
    has the others: the norm is global, and all ranks refuse an update together.

    Muon updates the parameters named by `matrices`, with the learning rate `matrix_rate` and the
    same schedule and decay. It ignores the scale of gradients, so only AdamW's are clipped.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        settings: OptimizerSection,
        *,
        total_steps: int = 0,
        group: ProcessGroup = SINGLE_PROCESS,
        matrices: Collection[str] = (),
        matrix_rate: float = 0.0,
    ) -> None:
        self._settings, self._total_steps, self._group = settings, total_steps, group
        self._matrix_settings = settings.model_copy(update={"learning_rate": matrix_rate})
        self._parameters = dict(parameters)
        self._matrices = {name: self._parameters[name] for name in matrices}
        self._others = {n: p for n, p in self._parameters.items() if n not in self._matrices}
        self._momentum: dict[str, Tensor] = {}
        self._adamw = torch.optim.AdamW(
            [
                {
                    "params": [p for p in self._others.values() if p.dim() >= 2],
                    "weight_decay": settings.weight_decay,
                },
                {"params": [p for p in self._others.values() if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

    def update(self, step: int) -> Update:
        """Clip the gradients and apply them at the rate of `step`, then free them.

        Raises NonFiniteError naming the step and the parameter; nothing is modified then.
        """
        rate, matrix_rate = (
            scheduled_rate(step, each, self._total_steps)
            for each in (self._settings, self._matrix_settings)
        )
        try:
            norm, matrix_norm = self._grad_norm(step, self._others), 0.0
            if self._matrices:
                matrix_norm = float(self._grad_norm(step, self._matrices))
            if float(norm) + 1e-6 > self._settings.max_grad_norm:  # else a product with 1
                torch.nn.utils.clip_grads_with_norm_(
                    self._others.values(), self._settings.max_grad_norm, norm
                )
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
            for name, matrix in self._matrices.items():
                momentum = self._momentum.setdefault(name, torch.zeros_like(matrix))
                muon.move(matrix, momentum, matrix_rate, self._settings.weight_decay)
        finally:
            self.discard()
        return Update(grad_norm=math.hypot(norm, matrix_norm), learning_rate=rate)

    def _grad_norm(self, step: int, parameters: Mapping[str, nn.Parameter]) -> Float[Tensor, ""]:
        """Return the global norm; NonFiniteError names a gradient that is not finite."""
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        # NOTE: a model packed for inference computes without gradients and raises nothing.
        missing = parameters.keys() - gradients.keys()
        assert not missing, f"no gradient reached {min(missing)}: was the model packed?"
        own = torch.nn.utils.get_total_norm(gradients.values())
        norm = own.new_tensor(math.hypot(*self._group.gather([own.item()])[:, 0].tolist()))
        if norm.isfinite():
            return norm
        broken = self._group.gather([not g.isfinite().all() for g in gradients.values()]).any(0)
        for name, is_broken in zip(gradients, broken.tolist(), strict=True):
            if is_broken:
                raise NonFiniteError(
                    f"step {step}: the gradient of {name} is not finite; no update was made"
                )
        raise NonFiniteError(f"step {step}: the gradient norm overflows; no update was made")

    def discard(self) -> None:
        """Free accumulated gradients without using them."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Copy the moments, keyed `exp_avg/<parameter>`; empty before the first update."""
        return {name: moment.detach().clone() for name, moment in self.moments().items()}

    def moments(self) -> dict[str, Tensor]:
        """Return the moments themselves, keyed as in `tensors`."""
        found = {f"momentum/{name}": momentum for name, momentum in self._momentum.items()}
        return found | {
            f"{moment}/{name}": self._adamw.state[parameter][moment]
            for name, parameter in self._others.items()
            if parameter in self._adamw.state
            for moment in _MOMENTS
        }

    def broadcast_moments(self, group: ProcessGroup, source: int) -> None:
        """Replace the moments of all other ranks by those of rank `source`, bit for bit."""
        state = self._adamw.state
        if not group.gather([bool(state)])[source].item():
            state.clear()
            return
        for parameter in () if state else self._parameters.values():
            state[parameter] = {each: torch.zeros_like(parameter.detach()) for each in _MOMENTS}
            state[parameter]["step"] = torch.zeros((), device=parameter.device)
        group.broadcast(source, list(self.moments().values()))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy moments as `tensors` gave them; CheckpointError if they are another model's."""
        expected = {f"{each}/{n}": p for n, p in self._others.items() for each in _MOMENTS}
        expected |= {f"momentum/{name}": p for name, p in self._matrices.items()}
        other = "optimizer state of another model"
        for name, parameter in expected.items() if tensors else ():
            shape = torch.Size() if name.startswith("step/") else parameter.shape
            if name not in tensors or tensors[name].shape != shape:
                raise CheckpointError(f"{other}: {name} is missing or misshapen")
        if unknown := tensors.keys() - expected.keys():
            raise CheckpointError(f"{other}: {min(unknown)} is of none of its parameters")
        moments = {n: tensors[n].to(p.device, copy=True) for n, p in expected.items() if tensors}
        self._adamw.state.clear()
        for name, parameter in self._others.items() if moments else ():
            self._adamw.state[parameter] = {each: moments[f"{each}/{name}"] for each in _MOMENTS}
        self._momentum = {n: moments[f"momentum/{n}"] for n in self._matrices if moments}


def load_parameters(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the parameters; CheckpointError, before any copy, if one does not fit."""
    for name, parameter in parameters.items():
        if name not in tensors or tensors[name].shape != parameter.shape:
            raise CheckpointError(f"weights of another model: {name} is missing or misshapen")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def check_loss(parameters: Mapping[str, nn.Parameter], loss: float, step: int, name: str) -> None:
    """Raise NonFiniteError for a loss that is not finite, naming broken weights if there are."""
    if not math.isfinite(loss):
        broken = (n for n, p in parameters.items() if not p.isfinite().all())
        raise NonFiniteError(f"step {step}: {next(broken, name)} is not finite; no update was made")
