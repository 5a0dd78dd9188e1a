"""Adapters (LoRA; Hu et al. 2021) by PEFT: small matrices that learn beside frozen weights.

weight + scale B A     generates: published under the weight's own name
weight                 the reference of the KL divergence: the same model, adapters off
A, B                   gradients, moments, checkpoints (PEFT's files)
"""

import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
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

    _dropouts: Sequence["_Dropout"] = ()

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
        generator, dropouts = torch.Generator().manual_seed(seed), []
        for index, layer in enumerate(self._adapted.values()):
            if isinstance(layer.get_base_layer(), nn.Linear):  # autocast takes inputs as they are
                layer.cast_input_dtype_enabled = bool(settings.dropout)
            weight = layer.lora_A["default"].weight
            bound = weight.shape[1] ** -0.5  # as PEFT draws it, from global random state
            drawn = torch.rand(weight.shape, generator=generator, dtype=weight.dtype)
            weight.data.copy_((2 * drawn - 1) * bound)
            if settings.dropout:
                dropouts.append(_Dropout(settings.dropout, index))
                layer.lora_dropout["default"] = dropouts[-1]
        self._dropouts = dropouts

    def hidden(
        self, packed: PackedSequences, *, recompute: bool = False
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the last hidden states; the dropout of adapters is a function of the tokens."""
        if self._dropouts and torch.is_grad_enabled():
            seed = zlib.crc32(packed.tokens.cpu().contiguous().numpy().data)
            for dropout in self._dropouts:
                dropout.seed = seed
        return super().hidden(packed, recompute=recompute)

    def hold_casts(self, dtype: torch.dtype | None) -> None:
        """Convert LM head and frozen matrices for autocast, which would do so in every pass."""
        super().hold_casts(dtype)
        for layer in self._adapted.values():
            if type(linear := layer.get_base_layer()) is not nn.Linear:
                continue
            linear.__dict__.pop("forward", None)
            if dtype is not None:
                cast = linear.weight.detach().to(dtype)
                linear.__dict__["forward"] = partial(F.linear, weight=cast, bias=linear.bias)

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

    def save(self, path: Path, eos_ids: Sequence[int], bos_id: int | None = None) -> None:
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
        self._save_whole(path, eos_ids, bos_id, state_dict=merged)

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


@final
class _Dropout(nn.Module):
    """Dropout that needs no random state: the same seed and shape give the same mask.

    So a recomputed layer and a resumed run have the masks of the first time.
    """

    def __init__(self, share: float, number: int) -> None:
        super().__init__()
        self._share, self._number = share, number
        self.seed = 0
        """Seed of the newest pass with gradients."""

    def forward(self, x: Tensor) -> Tensor:
        """Drop a share of the numbers, and scale the others up; in a pass with gradients only."""
        if not torch.is_grad_enabled():
            return x
        seed = hash((self.seed, self._number, *x.shape)) % 2**63
        drawn = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))
        return x * (drawn.to(x.device) >= self._share) / (1 - self._share)


def import_peft() -> Any:
    """Import PEFT. Raises ConfigError with the command that installs it."""
    return import_extra("peft", "lora", "learner.lora")
