"""Environments of other packages, played as they are; skipped where these are not installed."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from longtail.rl.environments.session import Reply, Session

Player = Callable[[Sequence[Reply]], str]


def opened(name: str, package: str) -> Session:
    pytest.importorskip(package)
    return Session(name, (), "hermes")


def played(session: Session, row: Mapping[str, Any], seed: int, player: Player) -> list[Reply]:
    """Return the answers of an episode; `player` writes the next text."""
    replies = [session.reset(row, seed)]
    while not replies[-1].done:
        replies.append(session.step(player(replies)))
    return replies


def read(reply: Reply) -> str:
    return "".join(each["content"] for each in reply.messages)


def towers(replies: Sequence[Reply]) -> str:
    assert "Current Board" in read(replies[-1])
    return f"[{['A C', 'A B', 'C B', 'A C', 'B A', 'B C', 'A C'][len(replies) - 1]}]"


def bisect(replies: Sequence[Reply]) -> str:
    low, high = 1, 20
    for reply in replies[1:]:
        guess = (low + high) // 2
        low, high = (guess + 1, high) if "higher" in read(reply) else (low, guess - 1)
    return f"[{(low + high) // 2}]"


def calculate(replies: Sequence[Reply]) -> str:
    if len(replies) == 1:
        (sum_,) = re.findall(r"problem: (.*) =", read(replies[0]))
        return f"<python>print({sum_})</python>"
    (result,) = re.findall(r"result: (-?\d+)", read(replies[1]))
    return rf"\boxed{{{result}}}"


def count(replies: Sequence[Reply]) -> str:
    return f"#### {16 + len(replies)}"


GSM = {"prompt": "How many?", "reward_spec": {"ground_truth": "18"}, "max_turns": 3}


@pytest.mark.parametrize(
    ("name", "package", "row", "player", "turns", "reward"),
    [
        ("textarena:TowerOfHanoi-v0", "textarena", {}, towers, 7, 1.0),
        ("textarena:GuessTheNumber-v0", "textarena", {}, bisect, None, 1.0),
        ("gem:rg:chain_sum+python", "gem", {}, calculate, 2, 1.0),
        ("skyrl:gsm8k_multi_turn", "skyrl_gym", GSM, count, 2, 1.0 + 0.2 / 3),
    ],
)
def test_an_environment_of_a_package_is_won_again_under_its_seed(
    name, package, row, player, turns, reward
):
    session = opened(name, package)
    replies = played(session, row, 7, player)
    assert sum(reply.reward for reply in replies) == pytest.approx(reward)
    assert len(replies) - 1 == (turns or len(replies) - 1)
    played(session, row, 8, player)
    assert (
        played(session, row, 7, player) == replies == played(opened(name, package), row, 7, player)
    )
    session.close()
