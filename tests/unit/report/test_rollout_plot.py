import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from longtail.engine.report import Switch
from longtail.engine.rollout_log import RolloutSeries
from longtail.errors import ConfigError
from longtail.report.rollout_plot import draw, plain_share
from support.fakes import do_without


def _series(steps: int, drafts: Callable[[int], int], switches: int = 2) -> RolloutSeries:
    counts = tuple(drafts(index) for index in range(steps))
    return RolloutSeries(
        seconds=tuple(0.01 * (index + 1) for index in range(steps)),
        running=tuple(max(1, 64 - index // 10) for index in range(steps)),
        drafts=counts,
        nodes=tuple(3 * count for count in counts),
        accepted=counts,
        readings=((0.01,),) * steps,
        switches=tuple(
            (index, Switch(drafts=index % 2 == 0, reason="x")) for index in range(switches)
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "series",
    [
        _series(1, lambda _: 0, switches=0),
        _series(1, lambda _: 4, switches=1),
        _series(7, lambda index: index % 2),
        _series(5000, lambda index: 8 * (index > 2000), switches=300),
    ],
    ids=("one plain step", "one drafted step", "few", "many"),
)
def test_every_rollout_can_be_plotted(tmp_path: Path, series: RolloutSeries) -> None:
    path = tmp_path / "deep" / "rollout.png"
    draw(series, path, title="$unclosed maths")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_share_of_plain_decoding_is_weighted_by_time() -> None:
    series = _series(4, lambda index: int(index == 3))
    assert plain_share(series) == pytest.approx(0.75)
    assert plain_share(_series(4, lambda _: 1)) == 0.0


def test_without_matplotlib_the_error_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do_without(monkeypatch, "matplotlib")
    with pytest.raises(ConfigError, match=rf"matplotlib: {sys.executable} -m pip install"):
        draw(_series(2, lambda _: 1), tmp_path / "rollout.png")
    assert not list(tmp_path.iterdir())
