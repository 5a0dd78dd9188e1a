"""The policy of another framework as the engine holds it: a copy of its weights, and an engine.

    its model --parameters by Hugging Face's names--> rows of this copy --pack--> engine
                 (at each change)

The copy is written in place. The engine grows with the longest request so far; its KV is freed
between two rollouts, so that learner and engine use the same device.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from longtail.assembly.engine import GrowingEngine
from longtail.drafter.weights import are_finite
from longtail.engine.engine import RolloutEngine
from longtail.engine.report import StepReport
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.engine.text import Decode
from longtail.errors import ConfigError, NonFiniteError
from longtail.model.hf.weights import hf_rows
from longtail.model.transformer import Transformer
from longtail.types import Completion, PolicyWeights, Request

_HEAD = "lm_head.weight"
_LENGTH_STEP = 256
"""Tokens by which the longest text grows; a new engine measures its costs again."""


@final
class MirroredPolicy:
    """A copy of another framework's weights, which an engine generates with.

    `model` is empty until the first `pull`. Texts have at most `max_len` tokens, prompts included.
    """

    def __init__(
        self,
        model: Transformer,
        decode: Decode,
        *,
        max_running: int,
        max_len: int,
        reserved_bytes: int = 0,
    ) -> None:
        self.model = model
        self.max_len = min(max_len, model.config.max_positions)
        """Most tokens of a prompt and its completion."""

        def make(limits: EngineLimits) -> RolloutEngine:
            return RolloutEngine(model, decode, limits, policy_version=self.version)

        self._engines = GrowingEngine(
            make,
            decode,
            max_running=max_running,
            length_step=_LENGTH_STEP,
            max_positions=self.max_len,
            reserved_bytes=reserved_bytes,
        )
        self._rows = hf_rows(model)
        self._speculation: Speculation | None = None
        self.version = 0
        """Number of pulls."""

    @property
    def engine(self) -> RolloutEngine | None:
        """The present engine; None before the first `ready`."""
        return self._engines.present

    def holds(self, parameters: Mapping[str, Tensor]) -> bool:
        """Return whether the copy equals these parameters; takes a few decoding steps."""
        return all(
            name in parameters and torch.equal(rows, parameters[name])
            for name, rows in self._rows.items()
        )

    def pull(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all parameters, by Hugging Face's names.

        Each is read before the next is taken. Raises ConfigError if they are of another model, and
        NonFiniteError with the name of a parameter that is not finite.
        """
        missing = set(self._rows)
        with torch.no_grad():
            for name, tensor in parameters:
                rows = self._rows.get(name)
                if rows is None and name == _HEAD:
                    continue  # tied to the embedding
                if rows is None or rows.shape != tensor.shape:
                    expected = "no such parameter" if rows is None else f"{tuple(rows.shape)}"
                    raise ConfigError(
                        f"the model's parameter {name} has shape {tuple(tensor.shape)}, and "
                        f"longtail's {self.model.config.family} model {expected}; longtail "
                        "cannot generate with this model"
                    )
                if not are_finite({name: tensor.detach()}):
                    raise NonFiniteError(f"{name} is not finite after {self.version} pulls")
                rows.copy_(tensor)
                missing.discard(name)
        if missing:
            raise ConfigError(f"the model lacks {min(missing)}: it is another model")
        self.version += 1
        if self.engine is not None:
            # Copied above; the engine packs them.
            self.engine.pull(PolicyWeights(version=self.version, tensors=self._rows))

    def speculate(self, speculation: Speculation | None) -> None:
        """Use a speculation from the next request on; None decodes plainly."""
        self._speculation = speculation

    def reset_estimates(self) -> None:
        """Estimate the gain of drafting anew, since a drafter was changed."""
        if self.engine is not None:
            self.engine.reset_estimates()

    def ready(self, requests: Sequence[Request]) -> RolloutEngine:
        """Return an idle engine with room for the requests."""
        engine = self._engines.ready(requests)
        if engine.speculation is not self._speculation:
            engine.speculate(self._speculation)
        return engine

    def generate(
        self, requests: Sequence[Request], on_step: Callable[[StepReport], None]
    ) -> list[Completion]:
        """Return the completions, in the order of the requests."""
        return self.ready(requests).generate(requests, on_step)

    def sleep(self) -> None:
        """Free the KV until the next request."""
        if self.engine is not None:
            self.engine.sleep()
