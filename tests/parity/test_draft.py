"""draft.c, a round of drafting in one call, drafts what growing level by level drafts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from longtail.drafter.kinds import KINDS
from longtail.model.kernels import native
from longtail.speculation.confidence import ConfidenceCurve
from longtail.speculation.drafter import Draftable
from longtail.speculation.strategy import DraftThresholds, Strategy
from longtail.speculation.tree import Accepted, DraftTree, depths
from support.eagle_requests import PROMPT_LEN, features_of, keyed_noise, make_layer, observe, text
from support.engine_requests import draftable
from support.tiny_models import tiny_model
from support.worked import confidences, reach_probabilities

pytestmark = pytest.mark.skipif(native.layout(torch.float32) is None, reason="no native round here")

LENGTHS, TEMPERATURES = (9, 30, 61, 44, 52), (1.0, 0.0, 0.7, 1.0, 0.9)
CHAIN = Strategy(depth=5)
SIBLINGS = Strategy(depth=5, width=2, beam=1, size=10)
WORTHS = (
    DraftThresholds(), DraftThresholds(verify=0.3), DraftThresholds(expand=0.3),
    DraftThresholds(verify=0.4, expand=0.2), DraftThresholds(level=2.0),
    DraftThresholds(verify=0.1, expand=0.2, level=0.7),
)  # fmt: skip


def drafter_of(recipe: str, dtype: torch.dtype = torch.float32, *, reduced: bool = False):
    """A drafter that has seen texts of LENGTHS up to their roots."""
    model = tiny_model(dtype=dtype)
    model.pack()
    ids = torch.arange(0, 128, 2) if reduced else None
    drafter = KINDS[recipe].drafter(make_layer(model, recipe), model, draft_ids=ids)
    for number, length in enumerate(LENGTHS):
        tokens, cut = text(length, seed=length), length - 2 - number  # windows fill unequally
        features = features_of(model, drafter, tokens)
        observe(drafter, str(length), tokens, features, 0, cut)
        observe(drafter, str(length), tokens, features, cut, length - 1)
    return drafter


def asked() -> list[Draftable]:
    return [
        draftable(str(n), text(n, seed=n), PROMPT_LEN, temperature=heat, max_depth=depth)
        for n, heat, depth in zip(LENGTHS, TEMPERATURES, (1, 3, 9, 9, 9), strict=True)
    ]


def assert_same_drafts(drafted: Sequence[DraftTree], grown: Sequence[DraftTree]) -> None:
    for one, other in zip(drafted, grown, strict=True):
        assert (one.tokens, one.parents) == (other.tokens, other.parents)
        # float32, sums of 64 to 256 terms near 1 in another order
        assert one.margins == pytest.approx(other.margins, abs=1e-4)
        # Both are products of the same float64 numbers, as long as margins share their bins.
        assert one.reach == pytest.approx(other.reach, rel=1e-12)


@pytest.mark.parametrize("recipe", ["eagle1", "eagle3", "ridge"])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("coupled", [False, True])
def test_the_native_round_drafts_what_growing_level_by_level_drafts(recipe, reduced, coupled):
    if reduced and recipe == "eagle1":
        pytest.skip("a reduced vocabulary is of others")
    fast, slow = (drafter_of(recipe, reduced=reduced) for _ in range(2))
    noise = keyed_noise(LENGTHS, 128) if coupled else None
    for shape in (CHAIN, SIBLINGS):
        drafted = fast.propose(asked(), shape, noise)
        assert_same_drafts(drafted, slow.grow(asked(), shape, noise))
        assert [tree.size for tree in drafted] == [shape.width * n for n in (1, 3, 5, 5, 5)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "worth"),
    [
        *((SIBLINGS, worth) for worth in WORTHS),
        (CHAIN, WORTHS[-1]),
        (replace(SIBLINGS, size=4), WORTHS[0]),
    ],
)
def test_both_leave_out_what_is_not_worth_it(shape, worth):
    fast, slow = (drafter_of("eagle3") for _ in range(2))
    noise, strategy = keyed_noise(LENGTHS, 128), replace(shape, thresholds=worth)
    drafted = fast.propose(asked(), strategy, noise)
    assert_same_drafts(drafted, slow.grow(asked(), strategy, noise))
    everything = fast.propose(asked(), replace(shape, size=10), noise)
    bites = worth != DraftThresholds() or shape.size == 4
    assert (sum(t.size for t in drafted) < sum(t.size for t in everything)) == bites
    sure = ConfidenceCurve()
    for tree in drafted:
        assert tree.size <= strategy.num_nodes
        assert tree.reach == pytest.approx(
            reach_probabilities(tree.parents, confidences(sure, tree.margins)), rel=1e-12
        )
        assert all(reach >= worth.verify for reach in tree.reach)
        assert all(tree.reach[parent - 1] >= worth.expand for parent in tree.parents if parent)


def test_both_follow_the_likelier_sibling_where_the_leader_is_known_to_be_wrong():
    """A learned curve need not rise with the margin: here what leads is always wrong."""
    fast, slow = (drafter_of("eagle1") for _ in range(2))
    noise = keyed_noise(LENGTHS, 128)
    for drafter in (fast, slow):
        for _ in range(20):
            trees = drafter.propose(asked(), SIBLINGS, noise)
            second = [Accepted(path=(2,), tokens=(tree.tokens[1],)) for tree in trees]
            drafter.learn(trees, second)
    drafted = fast.propose(asked(), SIBLINGS, noise)
    assert_same_drafts(drafted, slow.grow(asked(), SIBLINGS, noise))
    assert any(parent == 2 for tree in drafted for parent in tree.parents)


@pytest.mark.parametrize(
    ("dtype", "recipe", "shape"),
    [
        (torch.float32, "eagle1", CHAIN), (torch.float32, "eagle3", SIBLINGS),
        (torch.float32, "ridge", CHAIN), (torch.bfloat16, "eagle1", SIBLINGS),
        (torch.bfloat16, "eagle3", CHAIN), (torch.bfloat16, "ridge", SIBLINGS),
    ],
)  # fmt: skip
def test_a_draft_is_the_same_alone_and_among_others_that_stop_early(dtype, recipe, shape):
    if native.layout(dtype) is None:
        pytest.skip(f"no native round in {dtype}")
    strategy = replace(shape, thresholds=DraftThresholds(expand=0.3))
    drafter = drafter_of(recipe, dtype)
    together = drafter.propose(asked(), strategy, keyed_noise(LENGTHS, 128))
    alone = [
        drafter.propose([each], strategy, keyed_noise([len(each.tokens)], 128))[0]
        for each in asked()
    ]
    assert together == alone  # to the last bit of every margin
    assert len({max(depths(tree.parents)) for tree in together}) >= 3
