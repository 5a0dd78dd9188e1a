"""Requests that move without a forecast, so that a short run has many moves.

python -m support.moves WORDS     is `longtail WORDS` with them
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from longtail.cluster import rollout
from longtail.cluster.schedule.forecast import Unfinished
from longtail.cluster.schedule.moves import Move

SHARE_S = 0.05
MOST = 4
"""Most moves of a request: an episode repeats its turns after each."""
_moved: Counter[str] = Counter()


def half_of_the_most(
    loads: Mapping[int, Sequence[Unfinished]], idle: Sequence[int], early_s: float, forecast: Any
) -> Move | None:
    """Return a move of half of the longest shard, in place of one that gains."""
    source = max(loads, key=lambda worker: len(loads[worker]), default=None)
    others = [worker for worker in (*idle, *loads) if worker != source]
    if source is None or not others or not loads[source]:
        return None
    names = [text.request.request_id for text in loads[source]]
    moves = [name for name in names if _moved[name] < MOST][: -(-len(names) // 2)]
    _moved.update(moves)
    return Move(source=source, target=others[0], names=tuple(moves), gain_s=0.0) if moves else None


def move_often() -> None:
    """Move requests so in this process from now on."""
    rollout._SHARE_S, rollout.best_move = SHARE_S, half_of_the_most


if __name__ == "__main__":
    from longtail.cli.main import main

    move_often()
    sys.exit(main(sys.argv[1:]))
