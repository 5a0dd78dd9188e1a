"""Who keeps the moments of which parameter: dealt evenly, in the copies asked for, never cut."""

import pytest

from longtail.rl.collectives import spread
from longtail.rl.shares import deal

SIZES = (900, 48, 30, 30, 7, 512, 512, 64, 1, 1, 300)


@pytest.mark.parametrize("members", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("copies", [0, 1, 2, 4])
def test_every_parameter_has_so_many_keepers_and_loads_are_those_of_the_deal(members, copies):
    dealt = deal(SIZES, members, copies)
    wanted = min(copies or members, members)
    assert all(len(set(keepers)) == len(keepers) == wanted for keepers in dealt)
    owned = [sum(SIZES[i] for i in share) for share in spread(SIZES, members)]
    load = [sum(s for s, k in zip(SIZES, dealt, strict=True) if m in k) for m in range(members)]
    assert load == [sum(owned[(m - k) % members] for k in range(wanted)) for m in range(members)]


def test_any_loss_of_fewer_members_than_there_are_copies_leaves_a_keeper_of_everything():
    for members, copies in ((3, 2), (5, 3)):
        for first in range(members):
            lost = {(first + further) % members for further in range(copies - 1)}
            assert all(set(keepers) - lost for keepers in deal(SIZES, members, copies))


def test_the_example_of_the_docstring_is_what_is_dealt():
    assert deal([100, 60, 50], members=3, copies=2) == [(0, 1), (1, 2), (2, 0)]
