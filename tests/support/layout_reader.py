"""A second, independent reader of the published layout: plain PyTorch, float64, tensor by tensor.

It shares no code with `EagleLayer` but the rotary frequencies, and stacks and renames nothing.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.model.rope import Rope, RopeConfig


class LayoutReader:
    """A drafter from its config.json and its tensors."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], rope: RopeConfig
    ) -> None:
        self._config = config
        self._tensors = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
        self._prefix = "midlayer" if "norm.weight" in tensors else "layers.0"
        self._rope = Rope(config["head_dim"], rope)

    def read(
        self, features: Tensor, embeddings: Tensor, target_head: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits of the target's tokens after each pair (-inf: not drafted); the output feature."""
        features, embedded = features[:-1], embeddings[1:]
        eagle3 = self._prefix == "midlayer"
        if eagle3:
            features = self._linear("fc", features)
            normed = self._norm(f"{self._prefix}.hidden_norm", features)
            embedded = self._norm(f"{self._prefix}.input_layernorm", embedded)
            residual = normed if self._config.get("norm_before_residual") else features
            attended = torch.cat((embedded, normed), -1)
        else:
            residual = attended = self._linear("fc", torch.cat((embedded, features), -1))
        residual = residual + self._attention(attended)
        inner = self._norm(f"{self._prefix}.post_attention_layernorm", residual)
        gate = F.silu(self._linear(f"{self._prefix}.mlp.gate_proj", inner))
        up = self._linear(f"{self._prefix}.mlp.up_proj", inner)
        feature = residual + self._linear(f"{self._prefix}.mlp.down_proj", gate * up)
        return self._scores(
            self._norm("norm", feature) if eagle3 else feature, target_head
        ), feature

    def _scores(self, scored: Tensor, target_head: Tensor) -> Tensor:
        own = scored @ self._tensors.get("lm_head.weight", target_head).T
        if "d2t" not in self._tensors:
            return own
        scores = own.new_full((len(own), len(target_head)), float("-inf"))
        for draft_id, offset in enumerate(self._tensors["d2t"].tolist()):
            assert self._tensors["t2d"][draft_id + offset], "t2d and d2t name other tokens"
            scores[:, draft_id + offset] = own[:, draft_id]
        return scores

    def _attention(self, x: Tensor) -> Tensor:
        config, length = self._config, len(x)
        dim, heads = config["head_dim"], config["num_attention_heads"]
        groups = heads // config["num_key_value_heads"]
        prefix = f"{self._prefix}.self_attn"
        queries, keys, values = (
            self._linear(f"{prefix}.{name}_proj", x).view(length, -1, dim) for name in "qkv"
        )
        queries, keys = self._rotated(queries), self._rotated(keys)
        back = torch.arange(length)[:, None] - torch.arange(length)
        visible = back >= 0
        if config.get("layer_types") == ["sliding_attention"]:
            visible &= back < config["sliding_window"]
        out = []
        for head in range(heads):
            scores = queries[:, head] @ keys[:, head // groups].T * dim**-0.5
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            out.append(weights @ values[:, head // groups])
        return self._linear(f"{prefix}.o_proj", torch.cat(out, -1))

    def _rotated(self, x: Tensor) -> Tensor:
        rotation = self._rope.rotation(torch.arange(len(x)), torch.float64)
        half = x.shape[-1] // 2
        cos, sin = rotation.cos[..., half:], rotation.sin[..., half:]
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        size = (x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]).sqrt()
        return x / size * self._tensors[f"{name}.weight"]
