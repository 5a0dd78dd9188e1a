"""Names of drafters, refused shapes of drafts, and selected features."""

import pytest
import torch

from longtail.assembly.drafters import Target, drafter_names, open_drafter, open_trainable
from longtail.drafter.history import HistoryDrafter, PhraseDrafter
from longtail.drafter.ridge.drafter import RidgeDrafter
from longtail.errors import ConfigError
from longtail.run.drafter_store import drafter_directory
from longtail.speculation.drafter import NO_TAPS, Drafter, Taps
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import MAX_NODES
from support.engine_requests import draftable, observed
from support.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = tmp_path_factory.mktemp("target")
    return Target(
        model=tiny_model(), tokenizer=tiny_tokenizer(), directory=directory, name="my-model"
    )


def opened(names: str, target: Target, *, learns: bool = False) -> list[Drafter]:
    names = drafter_names(names, target.name, learns=learns)
    return [open_drafter(name, target) for name in names]


def test_none_is_no_drafter_and_auto_needs_no_weights(target):
    assert opened("none", target) == []
    assert [type(each) for each in opened("auto", target)] == [HistoryDrafter, PhraseDrafter]
    assert [type(each) for each in opened("phrases", target)] == [PhraseDrafter]


def test_auto_is_a_fresh_drafter_beside_history_where_it_can_learn(target):
    kinds = [type(each) for each in opened("auto", target, learns=True)]
    assert kinds == [RidgeDrafter, HistoryDrafter, PhraseDrafter]
    first, second = (open_trainable(["fresh", "history"], target) for _ in range(2))
    assert first.training.steps == 0
    assert first.layer.dtype == torch.float32
    assert first.layer.config == second.layer.config
    others = dict(second.layer.named_parameters())
    assert all(torch.equal(one, others[name]) for name, one in first.layer.named_parameters())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            "no-such-thing",
            r"speculation\.drafter.*'no-such-thing': it is neither history, phrases, fresh",
        ),
        ("history+none", "'none': it is neither"),
        ("fresh+history", "has to learn while it is used"),
        ("{place}", "neither a drafter nor a run with one"),
        ("mine:Deaf", r"'mine:Deaf': refresh\(obj, /\) must take \(\)"),
        ("history+builtins:dict", "'builtins:dict': it is a type; expected a subclass of Drafter"),
        ("textwrap:dedent", "it is a function; expected a subclass of Drafter"),
        ("mine", r"nor a directory \(mine is a module: write mine:NAME\); train one"),
    ],
)
def test_a_name_that_is_no_drafter_is_refused(names, message, target, tmp_path, module):
    source = "from longtail.drafter.history import *\nclass Deaf(HistoryDrafter): refresh = len"
    module(source, "mine")
    with pytest.raises(ConfigError, match=message):
        opened(names.format(place=tmp_path), target)
    with pytest.raises(ConfigError, match="no such directory"):
        drafter_directory(tmp_path / "absent")


MINE = """from longtail.drafter.history import HistoryDrafter
from longtail.speculation.tree import DraftTree
def two(tokens=(5, 6), parents=(0, 1), margins=(1.0, 1.0)):
    return 2 * [DraftTree(tokens=tokens, parents=parents, margins=margins)]
class Mine(HistoryDrafter):
    def observe(self, seen, features): seen[0].tokens.clear(); raise ValueError("boom")
    def propose(self, requests, strategy, noise): """


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [[5], [5]]", r"returned \[\[5\], \[5\]\]; expected a list with a DraftTree"),
        ("return two()[1:]", "returned 1 tree for 2 requests"),
        ("return two(margins=())", r"returned DraftTree\(.*; expected tuples of one length"),
        ("return two(parents=(0, 2))", "returned parent 2 of node 2; it must come first"),
        ("return two((-1, 999))", "returned token -1 of a vocabulary of 128"),
        ("return two((5, 999))", "returned token 999 of a vocabulary of 128"),
        ("raise SystemExit(3)", r"raised SystemExit: 3 \(mine.py:7, in propose\)"),
    ],
)
def test_what_a_drafter_of_yours_does_wrong_is_one_sentence(body, message, target, module):
    module(MINE + body, "mine")
    mine = open_drafter("mine:Mine", target)
    with pytest.raises(ConfigError, match=f"^speculation.drafter = 'mine:Mine': propose {message}"):
        mine.propose([draftable("a", [1]), draftable("b", [1])], Strategy(depth=2), None)


def test_a_drafter_of_yours_changes_no_tokens_and_its_trees_are_cut(target, module):
    module(MINE + "requests[0].tokens.clear(); return two()", "mine")
    mine, tokens = open_drafter("mine:Mine", target), [1, 2]
    trees = mine.propose([draftable("a", tokens), draftable("b", tokens)], Strategy(depth=1), None)
    with pytest.raises(ConfigError, match=r"Mine': observe raised ValueError: boom \(mine.py:6, "):
        mine.observe([observed("a", tokens, 0, 1)], None)
    assert (tokens, [tree.tokens for tree in trees]) == ([1, 2], [(5,), (5,)])


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("depth", 0, 1), ("width", 0, 1), ("size", -1, 0), ("beam", -1, 0)]
    + [(name, MAX_NODES + 1, least) for name, least in (("depth", 1), ("width", 1), ("size", 0))],
)
def test_a_shape_out_of_bounds_is_refused_by_its_name(name, value, least):
    with pytest.raises(ConfigError, match=rf"speculation\.{name} = {value}: .*from {least} to"):
        Strategy(**{"depth": 2, name: value})


def test_a_shape_that_drafts_on_too_many_nodes_is_refused():
    assert Strategy(depth=32, width=2).num_expanded == 2  # 2 x 31 = 62
    with pytest.raises(ConfigError, match="lower one of them"):
        Strategy(depth=33, width=2)
    assert Strategy(depth=33, width=2, beam=1).num_expanded == 1  # a beam is what is drafted on


EAGLE1, EAGLE3 = Taps(final=True), Taps(layers=(2, 4, 5))


def test_a_union_wants_what_either_wants_in_rising_order():
    both = Taps(layers=(4, 9)).union(EAGLE3)
    assert both == EAGLE3.union(Taps(layers=(4, 9))) == Taps(layers=(2, 4, 5, 9))
    assert EAGLE1.union(EAGLE3) == Taps(layers=(2, 4, 5), final=True)
    assert EAGLE1.union(NO_TAPS) == EAGLE1
    assert not NO_TAPS.union(NO_TAPS).any
