"""The embedded model of 1.6M parameters, which reasons in writing, and its drafters, as files.

    reasoner/         Hugging Face directory, bfloat16
    eagle1/, eagle3/  drafter directories

tests/support/make_toy.py writes them.
"""

from pathlib import Path

REASONER = Path(__file__).parent / "reasoner"
DRAFTERS = {recipe: Path(__file__).parent / recipe for recipe in ("eagle1", "eagle3")}
