"""The trainer's policy as the engine holds it: a copy of its weights, and an engine.

    its model --parameters by Hugging Face's names--> this copy --pack--> engine
                 (at each change)

The copy is written in place. The engine grows with the longest request so far.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

from torch import Tensor

from longtail.engine.engine import RolloutEngine
from longtail.engine.growing import GrowingEngine
from longtail.engine.speculation.speculator import Speculation
from longtail.engine.text import Decode
from longtail.generator import StepReport
from longtail.model.hf.weights import write_hf
from longtail.model.transformer import Transformer
from longtail.types import Completion, Request


@final
class MirroredPolicy:
    """A copy of the trainer's weights, which an engine generates with.

    `model` is empty until the first `pull`. Texts have at most `max_len` tokens, prompts included.
    """

    def __init__(
        self,
        model: Transformer,
        decode: Decode,
        *,
        max_running: int,
        max_len: int,
    ) -> None:
        self.model = model
        self.max_len = min(max_len, model.config.max_positions)
        """Most tokens of a prompt and its completion."""
        self._engines = GrowingEngine(
            lambda limits: RolloutEngine(model, decode, limits, policy_version=self.version),
            decode,
            max_running=max_running,
            max_len=self.max_len,
        )
        self._speculation: Speculation | None = None
        self.version = 0
        """Number of pulls."""

    def pull(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Take all parameters, by Hugging Face's names; see `Generator.load_policy`."""
        self.version += 1
        if (engine := self._engines.present) is None:
            write_hf(self.model, parameters, f"pull {self.version}")
        else:
            engine.load_policy(self.version, parameters)

    def speculate(self, speculation: Speculation | None) -> None:
        """Use a speculation from the next request on; None decodes plainly."""
        self._speculation = speculation

    def load_drafter(self, tensors: Mapping[str, Tensor]) -> None:
        """Draft with other weights; `speculate` gave the drafter."""
        assert self._speculation is not None, "no drafter was given"
        if (engine := self._engines.present) is None:
            self._speculation.load_weights(tensors)
        else:
            engine.load_drafter(tensors)

    def generate(
        self, requests: Sequence[Request], on_step: Callable[[StepReport], None]
    ) -> list[Completion]:
        """Return the completions, in the order of the requests."""
        engine = self._engines.ready(requests)
        if engine.speculation is not self._speculation:
            engine.speculate(self._speculation)
        return engine.generate(requests, on_step)
