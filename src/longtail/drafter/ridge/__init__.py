"""The ridge drafter: a block of tokens in one pass, from weights that follow from sums."""
