"""The closed-form start of an EAGLE-1 drafter: two ridge regressions on the target's features.

    stream = fc([embedding of x_i+1 ; feature of x_i])   ~  feature of x_i+1            (first)
    down(swiglu(gate_up(norm(stream))))                  ~  feature of x_i+1 - stream   (second)

The feed-forward's inner weights are copied from the target's last layer, whose output lies in the
same space; attention adds nothing yet. A few thousand tokens suffice, and no step size has to be
chosen: gradient steps from random weights need many times as many for the same acceptance.
"""

from collections.abc import Callable, Mapping
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.ridge.sums import RIDGE
from longtail.errors import CheckpointError
from longtail.model.transformer import DecoderLayer, Transformer

_FEWEST = 256
"""Rows of the first solution: fewer are soon replaced, and each solution is measured."""
_MANY = 1024
"""Known rows that are read before the next solution."""
_CHUNK = 1024
"""Rows between two checks for a stop."""


@final
class FeatureFit:
    """Collects rows for the regressions, and solves them when their number has doubled."""

    def __init__(self, layer: EagleLayer, target: Transformer) -> None:
        assert layer.config.recipe == "eagle1", "only eagle1 predicts features"
        self._layer, self._target = layer, target
        hidden = layer.config.target.hidden_size
        self._parts = [torch.empty(0, 3 * hidden, dtype=target.dtype, device=target.device)]
        self.num_rows = 0
        """Number of rows so far."""
        self.num_fitted = 0
        """Number of rows of the present solution."""
        self._first: _Regression | None = None
        """Regressions in progress; None: none is."""
        self._second = _Regression(0)
        self._norm = self._gate_up = torch.empty(0)

    @property
    def rows(self) -> Float[Tensor, "rows joined"]:
        """Embedding, feature and next feature of each row."""
        if len(self._parts) > 1:  # joined when they are read, not at every addition
            self._parts = [torch.cat(self._parts)]
        return self._parts[0]

    @staticmethod
    def restored(
        layer: EagleLayer, target: Transformer, tensors: Mapping[str, Tensor]
    ) -> "FeatureFit":
        """Return the state that `tensors` gave; CheckpointError if it is another drafter's."""
        fit = FeatureFit(layer, target)
        rows, num_fitted = tensors.get("rows"), tensors.get("num_fitted")
        if rows is None or num_fitted is None or rows.shape[1:] != fit.rows.shape[1:]:
            raise CheckpointError("state of another drafter: rows of the start do not fit it")
        fit.add(rows)
        fit.num_fitted = int(num_fitted)
        return fit

    def tensors(self) -> dict[str, Tensor]:
        """Return the state."""
        return {"rows": self.rows, "num_fitted": torch.tensor(self.num_fitted)}

    def is_due(self, *, is_next_known: bool) -> bool:
        """Return whether there are twice as many rows as in the last solution, and not too few.

        So all solutions, and the measurements after them, together cost twice the last one. While
        the next rows are known, so that reading them is nearly free, many are read first.
        """
        enough = self.num_rows >= max(_FEWEST, 2 * self.num_fitted)
        return enough and (not is_next_known or self.num_rows >= self.num_fitted + _MANY)

    def add(self, rows: Float[Tensor, "rows joined"]) -> None:
        """Append rows."""
        self._parts.append(rows.to(self._parts[0]))
        self.num_rows += len(rows)

    @torch.no_grad()
    def solve(self, stopped: Callable[[], bool]) -> bool:
        """Set the layer's weights to the solution for the present rows.

        Returns False, with no weight changed, if `stopped` returned True between two chunks; the
        next call continues there.
        """
        if self._first is None:
            self._first, self._second = _Regression(self.num_rows), _Regression(self.num_rows)
            last = self._target.layers[-1]
            assert isinstance(last, DecoderLayer)
            self._norm, self._gate_up = (
                each.weight.detach().to(self._layer.dtype, copy=True)
                for each in (last.feed_forward_norm, last.feed_forward.gate_up)
            )
        while (chunk := self._first.next(self.rows)) is not None:
            if stopped():
                return False
            self._first.add(*self._split(chunk))
        linear = self._first.solution()
        while (chunk := self._second.next(self.rows)) is not None:
            if stopped():
                return False
            inputs, wanted = self._split(chunk)
            stream = inputs @ linear
            self._second.add(self._inner(stream), wanted - stream)
        self._layer.fc.weight.copy_(linear.T)
        self._layer.output.weight.zero_()
        self._layer.feed_forward_norm.weight.copy_(self._norm)
        self._layer.feed_forward.gate_up.weight.copy_(self._gate_up)
        self._layer.feed_forward.down.weight.copy_(self._second.solution().T)
        self.num_fitted, self._first = self._second.num_rows, None
        return True

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and next features in the drafter's dtype."""
        inputs = 2 * self._layer.config.target.hidden_size
        rows = rows.to(self._layer.dtype)
        return rows[:, :inputs], rows[:, inputs:]

    def _inner(self, stream: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows inner"]:
        """Return the inputs of `down`."""
        eps = self._layer.config.shape.norm_eps
        normed = stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + eps) * self._norm
        gate, up = (normed @ self._gate_up.T).chunk(2, -1)
        return F.silu(gate) * up


@final
class _Regression:
    """A ridge regression of the first `num_rows` rows, summed chunk by chunk."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._next = 0
        self._gram = self._moment = torch.zeros((), dtype=torch.float64)
        self._dtype = torch.float64
        self._solution: Tensor | None = None

    def next(self, rows: Float[Tensor, "rows joined"]) -> Tensor | None:
        """Return the next chunk; None if there is none."""
        if self._next >= self.num_rows:
            return None
        return rows[self._next : min(self._next + _CHUNK, self.num_rows)]

    def add(
        self, inputs: Float[Tensor, "rows inputs"], wanted: Float[Tensor, "rows outputs"]
    ) -> None:
        """Add the chunk's sums."""
        self._gram = self._gram + (inputs.T @ inputs).double()
        self._moment = self._moment + (inputs.T @ wanted).double()
        self._dtype = inputs.dtype
        self._next += _CHUNK

    def solution(self) -> Float[Tensor, "inputs outputs"]:
        """Return the weights; computed once."""
        if self._solution is None:
            self._solution = ridge(self._gram, self._moment, self.num_rows).to(self._dtype)
        return self._solution


def ridge(
    gram: Float[Tensor, "inputs inputs"], moment: Float[Tensor, "inputs outputs"], num_rows: int
) -> Float[Tensor, "inputs outputs"]:
    """Return the weights of least squared error plus RIDGE times each weight's square.

    Inputs are first scaled to a mean square of 1, so that their units do not matter.

    Example: an input of 1 and a wanted output of 2 in all of 400 rows give the weight 1
    """
    mean_square = gram.diagonal() / num_rows
    scale = mean_square.clamp_min(torch.finfo(torch.float32).tiny).rsqrt()
    scaled = gram * scale[:, None] * scale
    scaled.diagonal().add_(RIDGE)
    solved = torch.linalg.solve(scaled, moment * scale[:, None])
    return solved * scale[:, None]
