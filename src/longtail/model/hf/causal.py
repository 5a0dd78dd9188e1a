"""Any causal language model of transformers as a policy, by transformers' own modelling code.

    packed      a a a b b c c c c                 each text is a row, padded on the right
    buckets     c c c c  |  b b                   of texts of similar length
                a a a .  |
    states      a a a b b c c c c                 of the tokens alone, in the packed order

A causal model never looks right, so no token sees padding or another text, whatever its attention.
No code of a model directory is run and no pickle is opened.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from longtail.errors import ConfigError, UnsupportedModelError
from longtail.model.attention import first_places
from longtail.model.hf.model import read_fields
from longtail.model.hf.weights import tensor_kinds
from longtail.model.kernels.scores import Head
from longtail.model.policy import Policy, Scorer
from longtail.model.transformer import ModelConfig, recomputed
from longtail.system.files import writing
from longtail.system.machine import MAX_INT32
from longtail.system.tensor_files import FLOATS, Kind, disk_errors
from longtail.types import PackedSequences

_MOST_PADDED = 0.1
"""Most padding of a bucket, as a share of its rows."""
_AMPLIFIED = 1000.0
"""Factor on hidden states at which a capped logit differs from a product, whatever the weights."""


class CausalModel(Policy):
    """A causal language model of transformers, without dropout, as if evaluated."""

    def __init__(self, model: Any) -> None:
        """Take a PreTrainedModel. Raises UnsupportedModelError if it cannot be scored by rows."""
        super().__init__()
        self.model = model.eval()
        # vLLM's own use of transformers' classes, in the same process, asks each instance for it.
        model.base_model.do_not_compile = True
        kind: Any = _transformers().modeling_layers.GradientCheckpointingLayer
        self._layers = [module for module in model.modules() if isinstance(module, kind)]
        for layer in self._layers:
            layer.gradient_checkpointing = True  # of layers in training, see `hidden`
            layer._gradient_checkpointing_func = recomputed
        self._head_cast: Tensor | None = None
        self._is_product = self._check_logits()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.model.device

    def hidden(
        self, packed: PackedSequences, *, recompute: bool = False
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the last hidden states of packed sequences; attention stays within each."""
        places = packed.places
        whole = packed.tokens if places is None else packed.tokens[places]
        lengths = [end - start for start, end in pairwise(packed.cu_seqlens)]
        texts, states = torch.split(whole, lengths), [whole.new_empty(0)] * len(lengths)
        for layer in self._layers:
            layer.training = recompute  # the layer alone: its modules stay without dropout
        for bucket in buckets(lengths):
            rows = pad_sequence([texts[i] for i in bucket], batch_first=True)
            outputs = self.model.base_model(input_ids=rows, use_cache=False)
            for index, row in zip(bucket, outputs.last_hidden_state, strict=True):
                states[index] = row[: lengths[index]]
        laid = torch.cat(states)
        return laid if places is None else laid.index_select(0, first_places(places))

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Return the logits of the next token, by the code of the model's own `forward`."""
        headed = copy.copy(self.model)
        headed._modules = {**self.model._modules, self.model.base_model_prefix: _Given()}
        return headed(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def score_head(self) -> Head:
        """Return the weight of the LM head, in the dtype of autocast if that is enabled."""
        weight, device = self.model.get_output_embeddings().weight, self.device.type
        computed = weight.detach()
        if torch.is_autocast_enabled(device):
            cast = self._head_cast
            computed = computed.to(torch.get_autocast_dtype(device)) if cast is None else cast
        return Head(weight=weight, computed=computed, is_product=self._is_product)

    def hold_casts(self, dtype: torch.dtype | None) -> None:
        """Convert the LM head for autocast, once for many passes; None drops the copy."""
        weight = self.model.get_output_embeddings().weight
        self._head_cast = None if dtype is None else weight.detach().to(dtype)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return all parameters."""
        return dict(self.model.requires_grad_(True).named_parameters())

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by the names of the model's files, as other engines read them."""
        own = {name: each.detach() for name, each in self.model.named_parameters()}
        yield from self._in_files(own).items()

    def reference(self) -> Scorer:
        """Return a frozen copy."""
        return copy.deepcopy(self).requires_grad_(False)

    def save(
        self, path: Path, eos_ids: Sequence[int], bos_id: int | None = None, **more: Any
    ) -> None:
        """Write a Hugging Face directory by `save_pretrained`, with `more` of its options."""
        kept = _transformers().GenerationConfig(
            eos_token_id=list(eos_ids) or None, bos_token_id=bos_id
        )
        self.model.generation_config = kept
        with writing("the model", path), disk_errors():
            self.model.save_pretrained(path, **more)

    def read(self, path: Path) -> Mapping[str, Tensor]:
        """Read the parameters of a directory that `save` wrote."""
        return dict(read_pretrained(path, self.dtype).named_parameters())

    def _in_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors in the names and the division of the model's files."""
        return _transformers().core_model_loading.revert_weight_conversion(self.model, tensors)

    def _check_logits(self) -> bool:
        """Return whether logits are a product with the head's weight, by a pass over few tokens.

        Raises UnsupportedModelError if logits of hidden states are not those of the whole model.
        """
        count = min(8, self.model.get_input_embeddings().num_embeddings)
        tokens = torch.arange(count, device=self.device)
        packed = PackedSequences(
            tokens=tokens,
            positions=tokens,
            sequence=torch.zeros_like(tokens),
            cu_seqlens=(0, count),
            loss_mask=torch.zeros_like(tokens, dtype=torch.float32),
        )
        head = self.model.get_output_embeddings()
        with torch.no_grad():
            expected = self.model(input_ids=tokens[None], use_cache=False).logits[0]
        with torch.enable_grad():  # dropout inside recomputed layers would show, too
            hidden = self.hidden(packed, recompute=True).detach()
        with torch.no_grad():
            if head is None or not _close(self.logits(hidden), expected):
                raise UnsupportedModelError(
                    f"{type(self.model).__name__}: its logits are not those of its last hidden "
                    "states, by which learner.model = 'transformers' scores; train another model"
                )
            if type(head) is not nn.Linear or head.bias is not None:
                return False
            hidden = hidden * _AMPLIFIED
            return _close(self.logits(hidden), F.linear(hidden, head.weight))


@final
class _Given(nn.Module):
    """Decoder whose last hidden states are its inputs."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """Return the inputs as a decoder's output."""
        outputs = _transformers().modeling_outputs
        return outputs.MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


def buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Divide texts into batches of similar length, longest first, of little padding.

    Example: lengths 10, 3, 9, 10 -> [[0, 3, 2], [1]]
    """
    found: list[list[int]] = []
    longest = tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens += lengths[index]
        if not found or longest * (len(found[-1]) + 1) * (1 - _MOST_PADDED) > tokens:
            found.append([])
            longest = tokens = lengths[index]
        found[-1].append(index)
    return found


def _transformers() -> Any:
    """Import transformers, which takes seconds, with the modules that are used here."""
    import transformers
    import transformers.core_model_loading
    import transformers.modeling_layers

    return transformers


def read_pretrained(path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """Return the PreTrainedModel of a directory.

    Raises ConfigError or UnsupportedModelError if transformers cannot open it, or if tensors are
    missing, quantized, NaN or infinite, with the tensor's name.
    """
    library = _transformers()
    library.logging.disable_progress_bar()
    with _opening(path):
        model, report = library.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"{path} lacks {missing[0]}: the weights and config.json must be of the same model"
        )
    stored, prefix = tensor_kinds(path), f"{model.base_model_prefix}."
    for name, parameter in model.named_parameters():
        kind = stored.get(name) or stored.get(name.removeprefix(prefix)) or Kind.of(parameter)
        fault = Kind.of(parameter).fault(parameter)
        if fault or kind.dtypes[0] not in FLOATS:
            raise ConfigError(
                f"{path}: {name} {fault or f'is {kind}, not floating-point'}: use an earlier "
                "checkpoint, or download it again"
            )
    return model.to(device)


def equal_decoder(path: Path) -> ModelConfig:
    """Return a dense decoder with the parameters and positions of a model; no weight is read.

    Raises ConfigError or UnsupportedModelError if transformers cannot open the directory.
    """
    library = _transformers()
    with _opening(path), torch.device("meta"):
        own = library.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        model = library.AutoModelForCausalLM.from_config(own, trust_remote_code=False)
        count = model.num_parameters()
    own = own.get_text_config()
    hidden, layers, heads = own.hidden_size, own.num_hidden_layers, own.num_attention_heads
    kv_heads = getattr(own, "num_key_value_heads", None) or heads
    dim = getattr(own, "head_dim", None) or hidden // heads
    embeddings = own.vocab_size * hidden * (1 if own.tie_word_embeddings else 2)
    rest = count - embeddings - layers * 2 * (heads + kv_heads) * dim * hidden
    return ModelConfig(
        family="llama",
        vocab_size=own.vocab_size,
        hidden_size=hidden,
        intermediate_size=max(1, -(-rest // (3 * hidden * layers))),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        max_positions=getattr(own, "max_position_embeddings", MAX_INT32),
        tied_embeddings=own.tie_word_embeddings,
    )


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Refuse quantized weights, and give a reason if transformers cannot open a directory."""
    if read_fields(path).get("quantization_config") is not None:
        raise UnsupportedModelError(
            f"{path}: quantization_config is set: quantized weights cannot be trained; use the "
            "float16, bfloat16 or float32 version of the model"
        )
    try:
        yield
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{path}: transformers cannot open it ({reason:.200}); give the directory of a causal "
            "language model that the installed version has"
        ) from error


def _close(ours: Tensor, theirs: Tensor) -> bool:
    most = float(theirs.abs().max())
    return torch.allclose(ours.to(theirs), theirs, rtol=0.0, atol=1e-4 * most)
