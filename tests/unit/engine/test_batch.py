"""The flat batch: the picture in the module's docstring, as decoding and as verification."""

import torch

from longtail.engine.batch import Scheduled, Segment, complete, flatten
from longtail.engine.request import ActiveRequest
from longtail.speculation.tree import DraftTree
from longtail.types import FinishReason, Request

CPU = torch.device("cpu")


def active(request_id: str, tokens: list[int], prompt_len: int, num_computed: int) -> ActiveRequest:
    request = Request(request_id=request_id, prompt_tokens=tuple(tokens[:prompt_len]), noise_key=0)
    return ActiveRequest(
        request=request, tokens=tokens, policy_version=3, num_computed=num_computed
    )


def test_a_draft_follows_its_root_at_the_positions_of_its_depths():
    a = active("a", [10, 11, 12, 13], 4, 0)
    b = active("b", list(range(20, 30)), 4, 9)
    c = active("c", list(range(30, 35)), 2, 4)
    tree = DraftTree(tokens=(5, 6, 7), parents=(0, 0, 1), margins=(0.0, 0.0, 0.0))
    chosen = [
        Scheduled(active=c, num_tokens=1),
        Scheduled(active=b, num_tokens=1, draft=tree),
        Scheduled(active=a, num_tokens=3),
    ]
    batch = flatten(chosen, CPU)
    assert batch.tokens.tolist() == [34, 29, 5, 6, 7, 10, 11, 12]
    assert batch.positions.tolist() == [4, 9, 10, 10, 11, 0, 1, 2]
    assert batch.segments[1] == Segment(request_id="b", num_context=9, num_tokens=1, draft=tree)
    assert batch.drawing is not None
    assert batch.drawing.tolist() == [0, 1, 2, 3, 4], "the root and every node, not the chunk"
    assert flatten(chosen[:2], CPU).drawing is None


def test_a_chunk_that_ends_inside_the_prompt_draws_no_token():
    a = active("a", [10, 11, 12, 13], 4, 1)
    first, last = Scheduled(active=a, num_tokens=2), Scheduled(active=a, num_tokens=3)
    assert not first.draws
    assert last.draws
    batch = flatten([first], CPU)
    assert batch.tokens.tolist() == [11, 12]
    assert batch.drawing is not None
    assert batch.drawing.tolist() == []


def test_a_request_counts_its_own_tokens():
    a = active("a", [10, 11, 12, 40, 41], 3, 4)
    assert (a.prompt_len, a.num_generated, a.num_pending) == (3, 2, 1)
    assert a.generated == (40, 41)
    a.logprobs += [-0.5, -1.0]
    done = complete(a, FinishReason.ABORT, lambda tokens: "text")
    assert (done.tokens, done.logprobs, done.text) == ((40, 41), (-0.5, -1.0), "text")
    assert (done.policy_version, done.finish_reason) == (3, FinishReason.ABORT)
