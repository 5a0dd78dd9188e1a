import math

import pytest
import torch
from torch import Tensor

from longtail.model.rope import Rope, RopeConfig, inverse_frequencies

LLAMA3 = RopeConfig(
    theta=500_000.0,
    scaling="llama3",
    factor=8.0,
    original_max_positions=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
YARN = RopeConfig(theta=1e6, scaling="yarn", factor=4.0, original_max_positions=32_768)


def vectors(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_frequencies_decrease_geometrically_from_one() -> None:
    frequencies = inverse_frequencies(4, RopeConfig(theta=100.0))
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1]))


def test_rotation_turns_each_pair_as_a_complex_number() -> None:
    config, positions = RopeConfig(theta=100.0), torch.tensor([0, 1, 7, 1000])
    x = vectors(4, 3, 6)
    turned = Rope(6, config).rotation(positions, torch.float64).apply(x)
    frequencies = inverse_frequencies(6, config).double()
    angles = positions[:, None, None].double() * frequencies
    expected = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), -1))


def test_scores_depend_on_the_distance_alone() -> None:
    rope, query, key = Rope(8, RopeConfig()), vectors(1, 1, 8), vectors(2, 1, 8)[1:]

    def score(query_position: int, key_position: int) -> float:
        turn = [
            rope.rotation(torch.tensor([at]), torch.float64).apply(x)
            for at, x in ((query_position, query), (key_position, key))
        ]
        return float((turn[0] * turn[1]).sum())

    assert math.isclose(score(9, 4), score(1009, 1004), rel_tol=1e-9)
    assert not math.isclose(score(9, 4), score(9, 5), rel_tol=1e-3)


def test_linear_scaling_divides_positions() -> None:
    scaled = Rope(8, RopeConfig(scaling="linear", factor=4.0))
    plain = Rope(8, RopeConfig())
    positions = torch.tensor([4, 40, 400])
    ours = scaled.rotation(positions, torch.float64)
    torch.testing.assert_close(ours.cos, plain.rotation(positions // 4, torch.float64).cos)


def test_llama3_keeps_short_wavelengths_and_scales_long_ones() -> None:
    plain = inverse_frequencies(128, RopeConfig(theta=LLAMA3.theta))
    scaled = inverse_frequencies(128, LLAMA3)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    assert torch.equal(scaled[short], plain[short])
    assert torch.equal(scaled[long], plain[long] / 8)
    between = scaled[~short & ~long] / plain[~short & ~long]
    assert between.numel() > 0
    assert ((between > 1 / 8) & (between < 1)).all()


def test_yarn_keeps_fast_dimensions_and_scales_slow_ones() -> None:
    plain = inverse_frequencies(128, RopeConfig(theta=YARN.theta))
    scaled = inverse_frequencies(128, YARN)
    rotations = YARN.original_max_positions * plain / (2 * math.pi)
    # rounding the range outward moves its ends by less than one dimension, a factor of 1.25 here
    assert torch.equal(scaled[rotations > 32 * 1.25], plain[rotations > 32 * 1.25])
    torch.testing.assert_close(scaled[rotations < 1 / 1.25], plain[rotations < 1 / 1.25] / 4)
    assert (scaled <= plain).all()
    assert (scaled >= plain / 4 * (1 - 1e-6)).all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.1 * math.log(4.0) + 1.0),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_scales_cos_and_sin_by_its_temperature(
    changes: dict[str, float], expected: float
) -> None:
    config = RopeConfig(
        **{"theta": 1e6, "factor": 4.0, "original_max_positions": 64, **changes}, scaling="yarn"
    )
    rotation = Rope(8, config).rotation(torch.tensor([0]), torch.float64)
    torch.testing.assert_close(rotation.cos, torch.full((1, 1, 8), expected, dtype=torch.float64))


def test_working_precision_rounds_only_at_the_end() -> None:
    positions = torch.tensor([100_000])
    rope = Rope(8, RopeConfig())
    rounded = rope.rotation(positions, torch.bfloat16).cos
    assert torch.equal(rounded, rope.rotation(positions, torch.float32).cos.bfloat16())


def test_frequencies_are_computed_under_the_meta_device() -> None:
    with torch.device("meta"):
        frequencies = [inverse_frequencies(64, config) for config in (RopeConfig(), LLAMA3, YARN)]
    assert all(bool(torch.isfinite(each).all()) for each in frequencies)
