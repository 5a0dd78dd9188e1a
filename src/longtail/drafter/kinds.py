"""The kinds of drafters with weights; a new one is a folder and a line here."""

from longtail.drafter.eagle.kind import EAGLE1, EAGLE3
from longtail.drafter.kind import DrafterKind
from longtail.drafter.ridge.kind import RIDGE

KINDS: dict[str, DrafterKind] = {"eagle1": EAGLE1, "eagle3": EAGLE3, "ridge": RIDGE}
"""By the name that `drafter.recipe` and drafter.json have."""
