"""The same adoption by vLLM's own calls for draft weights, where a version has them.

    LLM(..., weight_transfer_config={"backend": "longtail"})
    llm.start_draft_weight_update()
    llm.update_weights({"update_info": {"path": "better", "digest": "3fa9..."}})
    llm.finish_weight_update()

The server has the same as HTTP calls. The target's weights do not travel this way.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtail.errors import ConfigError
from longtail.integrations.vllm import adopt
from longtail.integrations.vllm.guards import Signature, check, class_of, names
from longtail.integrations.vllm.weights import read_weights

BACKEND = "longtail"
_REGISTER = Signature(first=names("name", "module_path_or_cls"), then=("class_name",))
_TARGET = Signature(first=names("self", "model", "model_config"))


@dataclass
class NoInfo:
    """Nothing is needed to begin."""


@dataclass
class DrafterDirectory:
    """New weights of a drafter, on a disk that each worker can read."""

    path: str
    digest: str | None = None


def check_calls() -> Any:
    """Return vLLM's factory of backends; ConfigError if it has no calls for draft weights."""
    place = "vllm.distributed.weight_transfer"
    factory = class_of(place, "WeightTransferEngineFactory")
    check(class_of(place, "WeightTransferEngine"), "set_weight_update_target", _TARGET)
    check(factory, "register_engine", _REGISTER)
    return factory


def install() -> None:
    """Register the backend, once. Raises ConfigError as `check_calls` does."""
    factory = check_calls()
    if BACKEND not in getattr(factory, "_registry", {}):
        factory.register_engine(BACKEND, engine_class())


def engine_class() -> type:
    """Return a weight transfer engine of vLLM that reads directories."""
    from vllm.distributed.weight_transfer import WeightTransferEngine

    class LongtailWeightTransfer(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls, update_info_cls = NoInfo, DrafterDirectory

        def init_transfer_engine(self, init_info: NoInfo) -> None:
            pass

        def start_weight_update(self) -> None:
            if self.model is self._default_model:
                raise ConfigError(
                    "the backend longtail takes weights of the drafter only: call "
                    "start_draft_weight_update"
                )

        def receive_weights(self, update_info: DrafterDirectory) -> None:
            found = read_weights(
                Path(update_info.path),
                Path(self.model_config.model),
                Path(self._default_model_config.model),
                update_info.digest,
            )
            adopt.load_in_place(
                self.model, self.model_config, found.tensors, shared=self._default_model
            )

        def finish_weight_update(self) -> None:
            pass

        def shutdown(self) -> None:
            pass

    return LongtailWeightTransfer
