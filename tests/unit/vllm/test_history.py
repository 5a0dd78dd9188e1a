"""Copies are what follows the longest known end, as a search in plain Python finds it."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.vllm.history import LONGEST, SequenceTable

DEPTH, LENGTH = 3, 24
TEXT = st.lists(st.integers(0, 2), min_size=2, max_size=16)


def places(table: SequenceTable, names: list[str], lengths: list[int]) -> torch.Tensor:
    """Return the places of requests."""
    return torch.tensor(table.given(names, [0] * len(names), lengths)[1])


def longest(end: list[int], texts: list[list[int]]) -> int:
    """Return how many tokens of an end are found before another token, up to the most compared."""
    best = 0
    for each in texts:
        for place in range(len(each) - 1):
            most = min(LONGEST, place + 1, len(end))
            matches = (end[-n:] == each[place + 1 - n : place + 1] for n in range(1, most + 1))
            best = max([best, *(n for n, ok in enumerate(matches, 1) if ok)])
    return best


@settings(deadline=None)
@given(
    prompts=st.lists(TEXT, min_size=2, max_size=2), written=st.lists(TEXT, min_size=4, max_size=4)
)
def test_the_longest_end_in_any_text_is_continued(prompts, written):
    table = SequenceTable(4, LENGTH * 2, torch.device("cpu"))
    texts = [prompts[i % 2] + each for i, each in enumerate(written)]
    for i, each in enumerate(texts):
        prompt = prompts[i % 2]
        table.begin(str(i), torch.tensor(prompt), len(prompt))
        new = torch.tensor([each[len(prompt) :]])
        at = len(prompt) + torch.arange(new.shape[1])[None]
        place = places(table, [str(i)], [len(each)])
        table.write(place, at, new, torch.ones_like(new, dtype=torch.bool))
    found = table.find(places(table, list("0123"), [*map(len, texts)]), DEPTH, table.width)
    for i, end in enumerate(texts):
        assert int(found.matched[i]) == longest(end, texts)
        copied = found.tokens[i][found.counts[i]].tolist()
        if found.matched[i]:
            known = end[-int(found.matched[i]) :] + copied
            assert copied
            assert any(str(known)[1:-1] in str(each) for each in texts)


def test_of_equal_matches_those_of_the_same_prompt_go_first() -> None:
    table = SequenceTable(4, LENGTH, torch.device("cpu"))
    for name, text in (("same", [5, 6, 7, 1]), ("other", [9, 6, 7, 2]), ("new", [5, 8, 6, 7])):
        table.begin(name, torch.tensor(text), 1)
    found = table.find(places(table, ["new"], [4]), 1, table.width)
    assert (found.matched.tolist(), found.tokens.tolist()) == ([2], [[1]])


def test_finished_texts_are_found_until_their_place_is_taken() -> None:
    table = SequenceTable(2, 1 << 24, torch.device("cpu"))
    for number in range(30):
        table.begin(f"old{number}", torch.tensor([5, 6, 7, 8, 9]), 2)
        table.keep([], [])
    table.begin("new", torch.tensor([5, 6, 7]), 2)
    found = table.find(places(table, ["new"], [3]), DEPTH, table.width)
    assert found.tokens[0][found.counts[0]].tolist() == [8, 9]


def test_what_does_not_count_is_written_to_no_text() -> None:
    table = SequenceTable(2, LENGTH, torch.device("cpu"))
    table.begin("a", torch.tensor([1, 2, 3]), 3)
    place = places(table, ["a"], [4])
    at, new = torch.tensor([[3, 4]]), torch.tensor([[8, 9]])
    table.write(place, at, new, torch.tensor([[True, False]]))
    tokens, counts = table.after(place, torch.tensor([2]), 2)
    assert tokens[0, 0] == 8
    assert counts[0].tolist() == [True, False]
