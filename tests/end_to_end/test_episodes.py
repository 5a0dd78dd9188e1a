"""Runs whose completions are episodes: the same with drafts and workers; kills: test_chaos.py."""

from pathlib import Path

import pytest

from end_to_end.workshop import EXACT, PLAIN, Workshop, build

pytestmark = pytest.mark.slow

WORDS = (
    *("--environment.name=end_to_end.rewards:Echo", "--environment.max_observed=64"),
    *("--reward.name=environment", "--rollout.max_tokens=24"),
    *("--rollout.max_running=3", "--run.steps=2", *EXACT),
)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    monkeypatch.chdir(tmp_path)
    return build(tmp_path, *WORDS)


def test_a_run_of_episodes_is_the_same_with_drafts_and_with_two_workers(workshop: Workshop) -> None:
    pytest.importorskip("ray")
    for name, words in (
        ("plain", (PLAIN,)),
        ("drafted", ("--speculation.drafter=fresh+history",)),
        ("two", (PLAIN, "--cluster.workers=2")),
    ):
        said = workshop.train(name, *words)
        assert said.code == 0, said.err
    assert workshop.texts("plain") == workshop.texts("drafted") == workshop.texts("two")
    rows, others = workshop.rollouts("plain"), workshop.rollouts("two")
    assert [row["messages"] for row in rows] == [row["messages"] for row in others]
    assert max(len(row["rewards"]) for row in rows) == 3
    assert all(abs(sum(row["rewards"]) - row["reward"]) < 1e-9 for row in rows)
    assert workshop.metrics("plain")[0]["environment/turns"] > 1
