"""The closed-form start of an EAGLE-1 drafter: two ridge regressions on the target's features.

    stream = fc([embedding of x_i+1 ; feature of x_i])   ~  feature of x_i+1            (first)
    down(swiglu(gate_up(norm(stream))))                  ~  feature of x_i+1 - stream   (second)

The feed-forward's inner weights are copied from the target's last layer, whose output lies in the
same space; attention adds nothing yet. A few thousand tokens suffice, and no step size has to be
chosen: gradient steps from random weights need ten times as many for the same acceptance.
"""

from collections.abc import Callable, Mapping
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longtail.drafter.eagle.layer import EagleLayer
from longtail.errors import CheckpointError
from longtail.model.transformer import DecoderLayer, Transformer

RIDGE = 400.0
"""Penalty of a weight whose input has a mean square of 1; the best one was the same for 11,000 and
42,000 rows, and halved or doubled it moves the acceptance by less than one percent."""
_CHUNK = 1024
"""Rows between two checks for a stop."""


@final
class FeatureFit:
    """Collects rows for the regressions, and solves them whenever their number has doubled."""

    def __init__(self, layer: EagleLayer, target: Transformer) -> None:
        assert layer.config.recipe == "eagle1", "only eagle1 predicts features"
        self._layer, self._target = layer, target
        hidden = layer.config.target.hidden_size
        self.rows = torch.empty(0, 3 * hidden, dtype=target.dtype, device=target.device)
        """Embedding, feature and next feature of each row."""
        self.num_fitted = 0
        """Number of rows of the present solution."""

    @staticmethod
    def restored(
        layer: EagleLayer, target: Transformer, tensors: Mapping[str, Tensor]
    ) -> "FeatureFit":
        """Return the state that `tensors` gave; CheckpointError if it is another drafter's."""
        fit = FeatureFit(layer, target)
        rows, num_fitted = tensors.get("rows"), tensors.get("num_fitted")
        if rows is None or num_fitted is None or rows.shape[1:] != fit.rows.shape[1:]:
            raise CheckpointError("state of another drafter: rows of the start do not fit it")
        fit.rows, fit.num_fitted = rows.to(fit.rows), int(num_fitted)
        return fit

    def tensors(self) -> dict[str, Tensor]:
        """Return the state."""
        return {"rows": self.rows, "num_fitted": torch.tensor(self.num_fitted)}

    @property
    def is_due(self) -> bool:
        """Whether the rows have doubled since the last solution."""
        return len(self.rows) >= 2 * self.num_fitted

    def add(self, rows: Float[Tensor, "rows joined"]) -> None:
        """Append rows."""
        self.rows = torch.cat((self.rows, rows.to(self.rows)))

    @torch.no_grad()
    def solve(self, stopped: Callable[[], bool]) -> bool:
        """Set the layer's weights to the solution for all rows.

        Returns False, with no weight changed, if `stopped` returned True between two chunks.
        """
        layer, last = self._layer, self._target.layers[-1]
        assert isinstance(last, DecoderLayer)
        norm, gate_up = (
            each.weight.to(layer.dtype)
            for each in (last.feed_forward_norm, last.feed_forward.gate_up)
        )
        first = self._regress(lambda inputs: inputs, None, stopped)
        if first is None:
            return False

        def inner(inputs: Tensor) -> Tensor:
            stream = inputs @ first
            scale = torch.rsqrt(
                stream.square().mean(-1, keepdim=True) + layer.config.shape.norm_eps
            )
            gate, up = ((stream * scale * norm) @ gate_up.T).chunk(2, -1)
            return F.silu(gate) * up

        second = self._regress(inner, first, stopped)
        if second is None:
            return False
        layer.fc.weight.copy_(first.T)
        layer.output.weight.zero_()
        layer.feed_forward_norm.weight.copy_(norm)
        layer.feed_forward.gate_up.weight.copy_(gate_up)
        layer.feed_forward.down.weight.copy_(second.T)
        self.num_fitted = len(self.rows)
        return True

    def _regress(
        self,
        transform: Callable[[Tensor], Tensor],
        known: Float[Tensor, "inputs hidden"] | None,
        stopped: Callable[[], bool],
    ) -> Float[Tensor, "transformed hidden"] | None:
        """Predict the next feature, less inputs @ `known`, from transformed inputs."""
        hidden = self._layer.config.target.hidden_size
        gram = moment = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(self.rows), _CHUNK):
            if stopped():
                return None
            rows = self.rows[start : start + _CHUNK].to(self._layer.dtype)
            inputs, wanted = rows[:, : 2 * hidden], rows[:, 2 * hidden :]
            wanted = wanted if known is None else wanted - inputs @ known
            features = transform(inputs)
            gram = gram + (features.T @ features).double()
            moment = moment + (features.T @ wanted).double()
        return ridge(gram, moment, len(self.rows)).to(self._layer.dtype)


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
