"""The tiny reasoner's drafter: trained once on this machine, then cached.

It learns from completions of the tiny reasoner for problems of the train split. The name of its
directory has a digest of everything that determines its weights.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from longtail.drafter.eagle.fresh import fresh_drafter
from longtail.drafter.eagle.layer import EagleConfig, Recipe
from longtail.drafter.formats.checkpoint import TrainingRecord, identity, save_drafter
from longtail.drafter.training.texts import TextBatches, pack_texts, write_texts
from longtail.drafter.training.trainer import DrafterTrainer, TrainerReport, TrainerSettings
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.model.hf.model import load_model
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.rl.data import tiny_task as task
from longtail.rl.data.examples import Example
from longtail.rl.optim import OptimizerSettings
from longtail.system.cache import build_once
from longtail.tiny.warmstart import SOURCE
from longtail.types import SamplingParams

_NAME = "tiny-drafter"
_MEASURED_DEPTHS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """Hyperparameters of the training; see LESSONS."""

    recipe: Recipe
    layers: tuple[int, ...] = (2, 4, 5)
    """eagle3."""
    window: int = 32
    unroll_steps: int
    problems: int = 384
    heldout: int = 32
    max_tokens: int = 1024
    steps: int
    batch_tokens: int = 384
    matrix_rate: float = 0.03
    learning_rate: float = 1e-2
    warmup_steps: int = 10
    seed: int = 0


LESSONS = {
    "eagle1": Lessons(recipe="eagle1", unroll_steps=2, steps=400),
    "eagle3": Lessons(recipe="eagle3", unroll_steps=5, steps=300),
}
"""Best settings found for each recipe within half a minute of training.

eagle1 is better here: it regresses the target's feature, so its features stay accurate at any depth
after training on two. Features of eagle3 drift beyond the trained depths.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Progress of the training after one step.

    Example: Lesson(step=10, steps=240, seconds=21.4, report=report)
    """

    step: int
    steps: int
    seconds: float
    """Seconds since the start, with the generation of the texts."""
    report: TrainerReport

    def line(self) -> str:
        """Return the progress as one line."""
        return (
            f"drafter {self.step}/{self.steps}  loss {self.report.loss:.3f}  expected accept "
            f"length {self.report.depths.accept_len:.2f}  {self.seconds:.0f} s"
        )


def train(
    lessons: Lessons,
    target_directory: Path,
    place: Path,
    on_progress: Callable[[Lesson], None] | None = None,
) -> None:
    """Train a drafter of the model in `target_directory` and write it to `place`."""
    began = time.perf_counter()
    tokenizer = load_tokenizer(target_directory)
    texts = _write(lessons, target_directory, tokenizer)
    learned, heldout = texts[lessons.heldout :], texts[: lessons.heldout]
    target = load_model(target_directory, torch.float32)  # not the engine's, which is packed
    target.fuse()
    config = EagleConfig(
        recipe=lessons.recipe,
        target=target.config,
        layers=lessons.layers if lessons.recipe == "eagle3" else (),
        window=lessons.window,
    )
    sample = pack_texts(learned[:16], lessons.batch_tokens)[0]
    generator = torch.Generator().manual_seed(lessons.seed)
    layer = fresh_drafter(config, target, sample, generator)
    trainer = DrafterTrainer(layer, target, _settings(lessons))
    batches = TextBatches(learned, lessons.batch_tokens, lessons.seed)
    num_tokens = 0
    for step in range(1, lessons.steps + 1):
        report = trainer.step(pack_texts(batches.take(), lessons.batch_tokens))
        num_tokens += report.num_tokens
        if on_progress is not None:
            seconds = time.perf_counter() - began
            on_progress(Lesson(step=step, steps=lessons.steps, seconds=seconds, report=report))
    depths = trainer.evaluate(pack_texts(heldout, 4096), _MEASURED_DEPTHS)
    record = TrainingRecord(
        steps=lessons.steps,
        tokens=num_tokens,
        unroll_steps=lessons.unroll_steps,
        agreement=depths.agreement,
        overlap=depths.overlap,
        accept_len=depths.accept_len,
    )
    save_drafter(place, layer, None, identity(SOURCE, target, tokenizer), record)


def ensure(
    target_directory: Path,
    on_progress: Callable[[Lesson], None] | None = None,
    cache_dir: Path | str | None = None,
    recipe: str = "eagle1",
) -> Path:
    """Return the directory of the tiny reasoner's drafter, training it first if it is not there.

    It lies under `cache_dir`, else in the user's cache.
    """
    lessons = LESSONS[recipe]
    return build_once(
        _NAME,
        f"{recipe}-{_digest(lessons, target_directory)}",
        lambda path: train(lessons, target_directory, path, on_progress),
        cache_dir,
    )


def _write(lessons: Lessons, directory: Path, tokenizer: Tokenizer) -> list[Example]:
    """Return completions of the tiny reasoner, those of held-out problems first."""
    rows: Sequence[dict] = [
        *task.problems(lessons.heldout, lessons.seed, "heldout"),
        *task.problems(lessons.problems, lessons.seed, "train"),
    ]
    prompts = [tokenizer.chat(row["prompt"]) for row in rows]
    longest = max(map(len, prompts)) + lessons.max_tokens
    limits = EngineLimits(max_running=128, max_step_tokens=512, max_len=longest)
    engine = RolloutEngine(load_model(directory, torch.float32), tokenizer.decode, limits)
    sampling = SamplingParams(max_tokens=lessons.max_tokens, stop_token_ids=tokenizer.eos_ids)
    return write_texts(engine.generate, prompts, sampling, samples=1, seed=lessons.seed)


def _settings(lessons: Lessons) -> TrainerSettings:
    return TrainerSettings(
        unroll_steps=lessons.unroll_steps,
        optimizer=OptimizerSettings(
            learning_rate=lessons.learning_rate,
            schedule="cosine",
            warmup_steps=lessons.warmup_steps,
            total_steps=lessons.steps,
        ),
        matrix_rate=lessons.matrix_rate,
        autocast=True,
    )


def _digest(lessons: Lessons, target_directory: Path) -> str:
    """Return a digest of what determines the weights: settings, target, source of the task."""
    digest = hashlib.sha256(repr((asdict(lessons), target_directory.name)).encode())
    digest.update(Path(task.__file__).read_bytes())
    return digest.hexdigest()[:16]
