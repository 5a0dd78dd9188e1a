"""Accumulators of the gradients of micro-batches and ranks, the same bits in any order.

    add(name, loss) ...    each gradient is added as whole numbers, and freed, when it is complete
    reduce                 whole numbers are added over the ranks
    settle                 accumulators x factor become the gradients that the optimizer reads

Floating-point sums depend on the order of their terms, so an update would depend on the number of
workers, and on which micro-batch was ready first. `model.kernels.fixed_point` has the arithmetic.
`exact=False` adds floating-point numbers all the same, in half of the memory.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from longtail.errors import NonFiniteError
from longtail.model.kernels.fixed_point import LIMIT, add_gradient, new_sums, write_gradient
from longtail.rl.collectives import ProcessGroup
from longtail.rl.learner_metrics import MetricsRow
from longtail.rl.optim import check_loss


@final
class GradientAccumulators:
    """Sums of the gradients of named micro-batches, and the metrics of each.

    Their memory exists from the first `add` to `settle` or `clear`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, exact: bool = True) -> None:
        self._parameters, self._exact = parameters, exact
        for parameter in parameters.values():
            parameter.grad_dtype = None  # of autocast: it is converted once, when it is added
        self._sums: dict[str, Tensor] = {}
        self.rows: dict[str, MetricsRow] = {}
        """Metrics of the micro-batches that were added, by name."""

    def add(self, name: str, loss: Tensor, row: MetricsRow) -> None:
        """Add the gradient of a micro-batch's loss; nothing for a parameter it does not reach."""
        largest = torch.zeros(len(self._parameters), device=loss.device)
        hooks = []
        for index, (owner, parameter) in enumerate(self._parameters.items()):
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            hooks.append(node.register_hook(partial(self._fold, owner, largest[index])))
        try:
            torch.autograd.backward(loss)
        except BaseException:
            self.clear()  # they hold a part of the gradient
            raise
        finally:
            for hook in hooks:
                hook.remove()
        found = largest.tolist()
        most = max(found)
        self.rows[name] = replace(row, largest=most, where=float(found.index(most)))

    def _fold(self, owner: str, largest: Tensor, *_: Any) -> None:
        parameter = self._parameters[owner]
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            add_gradient(self._of(owner), gradient, largest)

    def _of(self, owner: str) -> Tensor:
        if owner not in self._sums:
            self._sums[owner] = new_sums(self._parameters[owner], exact=self._exact)
        return self._sums[owner]

    def agree(self, group: ProcessGroup, names: Sequence[str]) -> set[str]:
        """Return those of a batch's micro-batches that one rank each has added.

        A rank clears its accumulators if it has added others, or one that another rank has, too.
        """
        has_unknown = not self.rows.keys() <= set(names)
        table = group.gather([*(name in self.rows for name in names), has_unknown]).bool()
        has = table[:, :-1]
        drops = table[:, -1] | (has & (has.sum(0) > 1)).any(1)
        if drops[group.rank]:
            self.clear()
        held = has[~drops].any(0).tolist()
        return {name for name, is_held in zip(names, held, strict=True) if is_held}

    def refuse(self, step: int, rows: Mapping[str, MetricsRow]) -> None:
        """Raise NonFiniteError if an update from the micro-batches with these rows cannot be made.

        All ranks have the same rows, and raise the same error.
        """
        for name, row in rows.items():
            check_loss(self._parameters, row.loss, step, f"the loss (micro-batch {name})")
        if (total := math.fsum(row.largest for row in rows.values())) >= LIMIT:
            worst = min(rows.values(), key=lambda row: (-row.largest, row.where))
            name = list(self._parameters)[int(worst.where)]
            why = "not finite" if math.isinf(total) else f"up to {total:.2g}, over {LIMIT:.2g}"
            raise NonFiniteError(
                f"step {step}: the gradient of {name} is {why}; no update was made"
            )

    def reduce(self, group: ProcessGroup) -> None:
        """Replace each accumulator by its sum over all ranks."""
        if group.size > 1:
            group.all_reduce([self._of(owner) for owner in self._parameters])

    def settle(self, factor: float) -> None:
        """Give every parameter its sum times a factor as its gradient; frees the sums."""
        for owner, parameter in self._parameters.items():
            parameter.grad = torch.empty_like(parameter, memory_format=torch.contiguous_format)
            write_gradient(self._of(owner), factor, parameter.grad)
            del self._sums[owner]

    def clear(self) -> None:
        """Free the accumulators and forget what was added."""
        self._sums.clear()
        self.rows.clear()
