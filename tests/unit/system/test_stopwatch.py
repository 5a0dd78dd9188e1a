"""The stopwatch of sections."""

import pytest

from longtail.system.stopwatch import Stopwatch


def test_a_stopwatch_sums_sections_and_restarts_with_each_lap() -> None:
    now = iter([0.0, 1.0, 3.0, 4.0, 4.5, 10.0, 11.0])
    watch = Stopwatch(lambda: next(now))
    with watch.section("rollout"):
        pass
    with pytest.raises(KeyError), watch.section("rollout"):
        raise KeyError
    assert watch.lap() == {"rollout": 2.5, "step": 10.0}
    assert watch.lap() == {"step": 1.0}
