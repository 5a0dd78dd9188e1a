"""Adapters (LoRA; Hu et al. 2021) by PEFT: small matrices that learn beside frozen weights.

weight + scale B A     generates: published under the weight's own name
weight                 the reference of the KL divergence: the same model, adapters off
A, B                   gradients, moments, checkpoints (PEFT's files)
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from longtail.config.rl import LoraSection
from longtail.errors import CheckpointError, ConfigError
from longtail.model.hf.causal import CausalModel
from longtail.model.kernels.scores import Head
from longtail.model.policy import Scorer
from longtail.system import tensor_files
from longtail.system.files import writing
from longtail.system.machine import import_extra
from longtail.system.tensor_files import Kind, disk_errors
from longtail.types import PackedSequences

WEIGHTS_FILE = "adapter_model.safetensors"
_IN_FILES = "base_model.model."
"""Prefix of each name in PEFT's files."""
_WRAPPED = ".base_layer"
"""Part that PEFT adds to the names of adapted weights."""


@final
class AdaptedModel(CausalModel):
    """A frozen causal language model with adapters, which are drawn from a seed."""

    def __init__(self, model: Any, settings: LoraSection, seed: int) -> None:
        """Take the model and add adapters. Raises ConfigError for targets that it does not have."""
        peft = import_peft()
        targets = list(settings.targets)
        config = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=targets[0] if targets == ["all-linear"] else targets,
            task_type="CAUSAL_LM",
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT's, about its own calls and patterns
                adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        except ValueError as error:
            raise ConfigError(f"learner.lora.targets = {targets}: {error}") from error
        kind: Any = peft.tuners.tuners_utils.BaseTunerLayer
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        if any(isinstance(module, kind) for module in ends):
            raise ConfigError(
                f"learner.lora.targets = {targets}: embedding and head are not adapted, since they "
                "may be one tensor; name modules inside the layers"
            )
        super().__init__(model)
        self._peft = (adapted,)  # not registered: its modules are those of the model
        self._adapted = {n: m for n, m in model.named_modules() if isinstance(m, kind)}
        generator = torch.Generator().manual_seed(seed)
        for layer in self._adapted.values():
            if isinstance(layer.get_base_layer(), nn.Linear):  # autocast takes inputs as they are
                layer.cast_input_dtype_enabled = False
            weight = layer.lora_A["default"].weight
            bound = weight.shape[1] ** -0.5  # as PEFT draws it, from global random state
            drawn = torch.rand(weight.shape, generator=generator, dtype=weight.dtype)
            weight.data.copy_((2 * drawn - 1) * bound)

    def hold_frozen(self, dtype: torch.dtype) -> None:
        """Keep the matrices of adapted linear layers in the dtype in which autocast multiplies.

        Logits have the same bits, and the matrices take less memory. Experts stay as they are.
        """
        for layer in self._adapted.values():
            if isinstance(linear := layer.get_base_layer(), nn.Linear):
                linear.to(dtype)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the adapters."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, the adapters added, by the names of the model's files.

        A matrix is merged when it is asked for, unless the files divide it otherwise (experts).
        """
        frozen = _frozen(self.model.named_parameters())
        names = {id(tensor): name for name, tensor in frozen.items()}
        files = self._in_files(dict(frozen))
        deltas, found = self._deltas(), {names.get(id(tensor)) for tensor in files.values()}
        if not deltas.keys() <= found:
            yield from self._in_files(self._merged(frozen)).items()
            return
        for name, tensor in files.items():
            delta = deltas.get(names.get(id(tensor), ""))
            yield name, tensor if delta is None else tensor + delta().detach()

    def reference(self) -> Scorer:
        """Return the same model with its adapters off."""
        return _Unadapted(self, self._peft[0])

    def save(self, path: Path, eos_ids: Sequence[int], bos_id: int | None = None, **_: Any) -> None:
        """Write the adapters in PEFT's files."""
        with writing("the adapters", path), disk_errors():
            self._peft[0].save_pretrained(path, save_embedding_layers=False)
            (path / "README.md").unlink()  # a form to fill in

    def read(self, path: Path) -> Mapping[str, Tensor]:
        """Read adapters from PEFT's files. Raises CheckpointError if they are others, or none."""
        names = {_IN_FILES + n.replace(".default.", "."): n for n in self.trainable()}
        wanted = {n: Kind(shape=tuple(self.trainable()[own].shape)) for n, own in names.items()}
        try:
            found = tensor_files.read(path / WEIGHTS_FILE, wanted)
        except ConfigError as error:
            raise CheckpointError(str(error)) from error
        return {names[name]: tensor for name, tensor in found.items()}

    def save_merged(self, path: Path, eos_ids: Sequence[int], bos_id: int | None = None) -> None:
        """Write the model with the adapters added, as a Hugging Face directory."""
        merged = self._merged(_frozen(self.model.state_dict().items()))
        super().save(path, eos_ids, bos_id, state_dict=merged)

    def _merged(self, frozen: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the model without adapters, with these added to the weights."""
        return frozen | {
            name: frozen[name] + delta().detach() for name, delta in self._deltas().items()
        }

    def _deltas(self) -> dict[str, Callable[[], Tensor]]:
        """Return a function for each adapted weight that computes what its adapter adds."""
        return {
            # experts are parameters
            f"{name.replace(_WRAPPED, '')}.{getattr(layer, 'parameter_name', 'weight')}": partial(
                layer.get_delta_weight, "default"
            )
            for name, layer in self._adapted.items()
        }


def _frozen(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the weights beside the adapters, by their names in the model without adapters."""
    return {
        name.replace(_WRAPPED, ""): tensor.detach()
        for name, tensor in tensors
        if ".lora_" not in name
    }


@final
class _Unadapted(Scorer):
    """An adapted model with its adapters off."""

    def __init__(self, adapted: AdaptedModel, peft_model: Any) -> None:
        self._adapted, self._peft = adapted, peft_model

    @property
    def device(self) -> torch.device:
        return self._adapted.device

    def hidden(self, packed: PackedSequences, *, recompute: bool = False) -> Tensor:
        with self._peft.disable_adapter():
            return self._adapted.hidden(packed, recompute=recompute)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._adapted.logits(hidden)

    def score_head(self) -> Head:
        return self._adapted.score_head()


def import_peft() -> Any:
    """Import PEFT. Raises ConfigError with the command that installs it."""
    return import_extra("peft", "lora", "learner.lora")
