"""Thoughts in texts. Grader processes read it, so it imports no torch."""

from longtail.model.hf.chat import END_THINK, THINK


def opens_thought(prompt: str) -> bool:
    """Return whether the text that a model reads ends with the tag that opens a thought."""
    return prompt.rstrip().endswith(THINK)


def ends_in_thought(text: str, *, is_opened: bool) -> bool:
    """Return whether a completion ends within its thought; `is_opened`: its prompt opened one.

    Example: ends_in_thought("<think>1 + 1 is 2, so", is_opened=False)
    """
    _, closed, after = text.rpartition(END_THINK)
    return THINK in after or (is_opened and not closed)
