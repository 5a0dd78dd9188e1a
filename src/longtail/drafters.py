"""From the name of a drafter to a drafter at work; what a name may be is said in `config`.

auto               the embedded model's own where it is the target, else history
history            suffixes of what was written, no weights
tiny-reasoner      the embedded model's own, taught here once (recipe eagle1; tiny-reasoner:eagle3)
a directory        a drafter that `longtail drafter train` made, or its run directory; or a
                   Hugging Face directory of a small model with the target's tokenizer
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from longtail.checkpoint import RunDirectory, policy_directory
from longtail.drafter import checkpoint
from longtail.drafter.draft_model import ModelDrafter
from longtail.drafter.eagle_drafter import EagleDrafter
from longtail.drafter.history import HistoryDrafter
from longtail.errors import ConfigError
from longtail.model import hf
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import Drafter
from longtail.tiny import drafter as tiny_drafter

_LESSONS_A_LINE = 50

HISTORY, TINY_REASONER = "history", "tiny-reasoner"
NONE, AUTO = "none", "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model that is drafted for, as rollouts hold it."""

    model: Transformer
    tokenizer: hf.Tokenizer
    directory: Path
    name: str
    """As the user wrote it."""


def open_drafter(
    name: str, target: Target, say: Callable[[str], None], *, window: int | None = None
) -> Drafter:
    """Make the drafter that `name` means, for this target.

    `window` replaces an EAGLE drafter's own (0: unbounded). Raises ConfigError for what cannot
    draft for this target.
    """
    if name == HISTORY:
        return HistoryDrafter()
    path = Path(name)
    embedded, _, recipe = name.partition(":")
    if embedded == TINY_REASONER:
        path = taught(target, recipe or "eagle1", say)
    elif not path.is_dir():
        raise ConfigError(
            f"speculation.drafter = {name!r}: it is neither {HISTORY}, {TINY_REASONER} nor a "
            "directory; train one with `longtail drafter train`"
        )
    if _is_model(path):
        return _small_model(name, path, target)
    path = drafter_directory(path)
    loaded = checkpoint.load_drafter(
        path, target.model, target.tokenizer, strict_weights=False, dtype=target.model.dtype
    )
    return EagleDrafter(loaded.layer, target.model, draft_ids=loaded.draft_ids, window=window)


def open_trainable(
    names: str, target: Target, say: Callable[[str], None]
) -> checkpoint.LoadedDrafter | None:
    """Read the weights of the first drafter that can be trained, in float32; None if none can."""
    for name in _names(names, target):
        path = _trainable_path(name, target, say)
        if path is not None:
            return checkpoint.load_drafter(
                path, target.model, target.tokenizer, strict_weights=False, dtype=torch.float32
            )
    return None


def _trainable_path(name: str, target: Target, say: Callable[[str], None]) -> Path | None:
    embedded, _, recipe = name.partition(":")
    if embedded == TINY_REASONER:
        return taught(target, recipe or "eagle1", say)
    path = Path(name)
    return None if name == HISTORY or _is_model(path) else drafter_directory(path)


def open_drafters(names: str, target: Target, say: Callable[[str], None]) -> tuple[Drafter, ...]:
    """Make the drafters that `names` means: one, several joined by +, `auto`, or `none`.

    Raises ConfigError as `open_drafter` does.
    """
    return tuple(open_drafter(name, target, say) for name in _names(names, target))


def _names(names: str, target: Target) -> list[str]:
    """Tell the drafters apart that are joined in one name."""
    if names == NONE:
        return []
    if names == AUTO:
        names = TINY_REASONER if target.name == TINY_REASONER else HISTORY
    parts = [names] if Path(names).is_dir() else names.split("+")
    if not all(parts):
        raise ConfigError(
            f"speculation.drafter = {names!r}: a name is missing beside +; as in DIR+{HISTORY}"
        )
    return parts


def drafter_directory(path: Path) -> Path:
    """Return the drafter directory that a path means: itself, a checkpoint's, or a run's newest."""
    for found in (path, path / "policy"):
        if checkpoint.is_drafter(found):
            return found
    latest = RunDirectory(path).load_latest() if path.is_dir() else None
    if latest is not None and checkpoint.is_drafter(latest.policy):
        return latest.policy
    reason = "neither a drafter nor a run with one" if path.exists() else "no such directory"
    raise ConfigError(
        f"{path}: {reason}; give a drafter directory (with drafter.json), a checkpoint, or a run "
        "directory of longtail drafter train"
    )


def _is_model(path: Path) -> bool:
    """Tell a Hugging Face directory, or a run of the policy, from a drafter's."""
    try:
        return (policy_directory(path) / "config.json").is_file()
    except ConfigError:
        return False


def taught(target: Target, recipe: str, say: Callable[[str], None]) -> Path:
    """Return the embedded model's drafter, teaching it first where it was never taught."""
    if target.name != TINY_REASONER:
        raise ConfigError(
            f"speculation.drafter = {TINY_REASONER!r} drafts for model.path = {TINY_REASONER!r} "
            f"only, not for {target.name!r}: set it to {HISTORY} or none, or train one with "
            "`longtail drafter train`"
        )
    if recipe not in ("eagle1", "eagle3"):
        raise ConfigError(
            f"speculation.drafter = '{TINY_REASONER}:{recipe}': the recipes are eagle1, eagle3"
        )

    def tell(lesson: tiny_drafter.Lesson) -> None:
        if lesson.step % _LESSONS_A_LINE == 0:
            say(lesson.line())

    return tiny_drafter.ensure(target.directory, on_progress=tell, recipe=recipe)


def _small_model(name: str, path: Path, target: Target) -> Drafter:
    tokenizer = hf.load_tokenizer(path)
    model = hf.load_model(path, target.model.dtype, target.model.device)
    same = checkpoint.tokenizer_digest(tokenizer) == checkpoint.tokenizer_digest(target.tokenizer)
    if not same or model.config.vocab_size != target.model.config.vocab_size:
        raise ConfigError(
            f"speculation.drafter = {name!r}: its tokenizer (vocabulary of "
            f"{model.config.vocab_size}) is not that of {target.name!r} "
            f"({target.model.config.vocab_size}); a draft model must share the target's"
        )
    return ModelDrafter(model)
