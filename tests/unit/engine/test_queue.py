"""The observation queue is bounded; test_speculator.py has what drafters observe."""

import torch

from longtail.engine.batch import Scheduled
from longtail.engine.request import ActiveRequest
from longtail.engine.speculation.queue import Computed, ObservationQueue
from longtail.types import Request

ACTIVE = ActiveRequest(
    request=Request(request_id="a", prompt_tokens=(0, 1, 2), noise_key=1),
    tokens=list(range(50)),
    policy_version=0,
)


def step(position: int, features: torch.Tensor) -> Computed:
    """A step that computed the token at a position."""
    return Computed([Scheduled(active=ACTIVE, num_tokens=1)], [position + 1], {}, features)


def test_steps_beyond_the_lookback_fall_off_the_end():
    queue = ObservationQueue(lookback=4)
    for position in range(3, 20):
        queue.add(step(position, torch.tensor([[float(position)]])))
    (news,) = queue.take(with_done=False)
    assert [(seen.start, seen.num_tokens) for seen in news.seen] == [(16, 4)]
    assert news.features is not None
    assert news.features[:, 0].tolist() == [16, 17, 18, 19]


def test_features_that_wait_are_bounded_but_the_last_step_stays():
    queue, large = ObservationQueue(), torch.zeros(1, 10 * 2**20)  # 40 MiB
    for position in (3, 4, 5):
        queue.add(step(position, large))
    (news,) = queue.take(with_done=False)
    assert [(seen.start, seen.num_tokens) for seen in news.seen] == [(5, 1)]
