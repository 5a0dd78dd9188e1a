"""A second, independent reader of the engines' layouts, to check exports: plain PyTorch, float64.

It computes tensor by tensor as an engine would, without `EagleLayer`, stacking or renaming. Only
the rotary frequencies are the model's (their parity with transformers is tested separately).

    pair i of a text      feature of token i, embedding of token i + 1, position i
"""

from collections.abc import Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from longtail.model.rope import Rope, RopeConfig


@final
class LayoutReader:
    """A drafter from its config.json and its tensors."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], rope: RopeConfig
    ) -> None:
        self._outer = config
        self._config = config.get("transformer_layer_config", config)
        self._tensors = {
            name: tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        self._eagle3 = "norm.weight" in tensors
        self._prefix = "midlayer" if "midlayer.hidden_norm.weight" in tensors else "layers.0"
        self._rope = Rope(self._config["head_dim"], rope)

    def read(
        self,
        features: Float[Tensor, "tokens features"],
        embeddings: Float[Tensor, "tokens hidden"],
        target_head: Float[Tensor, "vocab hidden"],
    ) -> tuple[Float[Tensor, "pairs vocab"], Float[Tensor, "pairs hidden"]]:
        """Return the logits of the target's tokens after each pair, and the output feature.

        Tokens outside the draft vocabulary have -inf.
        """
        features, embedded = features[:-1].double(), embeddings[1:].double()
        features = self._linear("fc", features) if self._eagle3 else features
        if self._eagle3:
            normed = self._norm(f"{self._prefix}.hidden_norm", features)
            embedded = self._norm(f"{self._prefix}.input_layernorm", embedded)
            residual = normed if self._outer.get("norm_before_residual") else features
            attended = torch.cat((embedded, normed), -1)
        else:
            residual = attended = self._linear("fc", torch.cat((embedded, features), -1))
        residual = residual + self._attention(attended)
        inner = self._norm(f"{self._prefix}.post_attention_layernorm", residual)
        gate = F.silu(self._linear(f"{self._prefix}.mlp.gate_proj", inner))
        up = self._linear(f"{self._prefix}.mlp.up_proj", inner)
        feature = residual + self._linear(f"{self._prefix}.mlp.down_proj", gate * up)
        scored = self._norm("norm", feature) if self._eagle3 else feature
        return self._scores(scored, target_head.double()), feature

    def _scores(self, scored: Tensor, target_head: Tensor) -> Tensor:
        own = scored @ self._tensors.get("lm_head.weight", target_head).T
        if "d2t" not in self._tensors:
            return own
        offsets: Int[Tensor, "draft"] = self._tensors["d2t"]
        scores = own.new_full((len(own), len(target_head)), float("-inf"))
        for draft_id, offset in enumerate(offsets.tolist()):
            assert self._tensors["t2d"][draft_id + offset], "t2d and d2t name other tokens"
            scores[:, draft_id + offset] = own[:, draft_id]
        return scores

    def _attention(self, x: Float[Tensor, "pairs inputs"]) -> Float[Tensor, "pairs hidden"]:
        config, length = self._config, len(x)
        dim, heads = config["head_dim"], config["num_attention_heads"]
        groups = heads // config["num_key_value_heads"]
        prefix = f"{self._prefix}.self_attn"
        queries = self._rotated(self._linear(f"{prefix}.q_proj", x).view(length, -1, dim))
        keys = self._rotated(self._linear(f"{prefix}.k_proj", x).view(length, -1, dim))
        values = self._linear(f"{prefix}.v_proj", x).view(length, -1, dim)
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

    def _rotated(self, x: Float[Tensor, "pairs heads head_dim"]) -> Tensor:
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
