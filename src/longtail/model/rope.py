"""Rotary position embedding with the frequency scalings of the supported families.

Su et al. 2021 (arXiv 2104.09864); linear interpolation: Chen et al. 2023 (arXiv 2306.15595);
YaRN: Peng et al. 2023 (arXiv 2309.00071); llama3: the Llama 3.1 release.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

RopeScaling = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Frequencies of the rotation. Field docstrings name the scalings that read the field."""

    theta: float = 10_000.0
    scaling: RopeScaling = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    """llama3, yarn: context length of the unscaled model."""
    low_freq_factor: float = 1.0
    """llama3."""
    high_freq_factor: float = 4.0
    """llama3."""
    beta_fast: float = 32.0
    """yarn: number of rotations above which a dimension is not interpolated."""
    beta_slow: float = 1.0
    """yarn: number of rotations below which a dimension is fully interpolated."""
    attention_factor: float | None = None
    """yarn: factor of cos and sin; None derives it from `factor`."""
    mscale: float | None = None
    """yarn: replaces the derived attention factor, together with `mscale_all_dim` (DeepSeek)."""
    mscale_all_dim: float | None = None
    truncate: bool = True
    """yarn: whether the correction range is rounded to whole dimensions."""


def _llama3(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    """Interpolate long wavelengths fully and short ones not at all; blend in between."""
    old_len, low, high = (
        config.original_max_positions,
        config.low_freq_factor,
        config.high_freq_factor,
    )
    wavelength = 2 * math.pi / inv_freq
    smooth = (old_len / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / config.factor + smooth * inv_freq
    scaled = torch.where(wavelength > old_len / low, inv_freq / config.factor, blended)
    return torch.where(wavelength < old_len / high, inv_freq, scaled)


def _yarn(inv_freq: Tensor, head_dim: int, config: RopeConfig) -> Tensor:
    """Apply NTK-by-parts (YaRN section 3.2): a ramp from extrapolation to interpolation."""

    def correction_dim(rotations: float) -> float:
        ratio = config.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = correction_dim(config.beta_fast), correction_dim(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of zero width would divide by zero
    dims = torch.arange(head_dim // 2, dtype=torch.float32, device=inv_freq.device)
    kept = 1 - ((dims - low) / (high - low)).clamp(0, 1)
    return inv_freq / config.factor * (1 - kept) + inv_freq * kept


def _yarn_attention_factor(config: RopeConfig) -> float:
    """Return YaRN's temperature (equation 22), a factor of cos and sin."""

    def get_mscale(scale: float, mscale: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return get_mscale(config.factor, config.mscale) / get_mscale(
            config.factor, config.mscale_all_dim
        )
    return get_mscale(config.factor, 1.0)


def inverse_frequencies(head_dim: int, config: RopeConfig) -> Float[Tensor, "half_dim"]:
    """Return the scaled radians per position of each pair of dimensions.

    float32, in the families' own order of operations: positions multiply every rounding error.
    """
    # NOTE: explicitly on the CPU, because models are also built on the meta device.
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    inv_freq = 1.0 / (config.theta**exponent)
    if config.scaling == "linear":
        return inv_freq / config.factor
    if config.scaling == "llama3":
        return _llama3(inv_freq, config)
    if config.scaling == "yarn":
        return _yarn(inv_freq, head_dim, config)
    return inv_freq


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """cos and signed sin of a step's positions, shared by all layers."""

    cos: Float[Tensor, "tokens 1 head_dim"]
    sin: Float[Tensor, "tokens 1 head_dim"]

    def apply(
        self, x: Float[Tensor, "tokens any_heads head_dim"]
    ) -> Float[Tensor, "tokens any_heads head_dim"]:
        """Rotate each pair (i, i + head_dim / 2) by its position's angle.

        With sin negated on the first half, rotate_half(x) * sin is a plain roll of x times sin.
        """
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)


class Rope:
    """Computes the rotation of any list of positions."""

    def __init__(self, head_dim: int, config: RopeConfig) -> None:
        self._inv_freq = inverse_frequencies(head_dim, config)
        self._scale = _yarn_attention_factor(config) if config.scaling == "yarn" else 1.0

    @property
    def is_finite(self) -> bool:
        """Whether all frequencies and the scale are finite."""
        return math.isfinite(self._scale) and bool(self._inv_freq.isfinite().all())

    def rotation(self, positions: Int[Tensor, "tokens"], dtype: torch.dtype) -> Rotation:
        """Return cos and sin in `dtype`, computed in float32, or in float64 for a float64 model."""
        working = torch.float64 if dtype == torch.float64 else torch.float32
        self._inv_freq = self._inv_freq.to(positions.device)
        angles = positions[:, None].to(working) * self._inv_freq.to(working)
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return Rotation(
            cos=torch.cat((cos, cos), -1)[:, None].to(dtype),
            sin=torch.cat((-sin, sin), -1)[:, None].to(dtype),
        )
