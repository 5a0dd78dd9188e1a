"""The tiny reasoner: trained once on this machine, then cached.

The name of its directory has a digest of everything that determines its weights: recipe, task,
tokenizer and shape.
"""

import hashlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from longtail import tiny
from longtail.model.hf import tokenizer as hf_tokenizer
from longtail.model.hf.model import save_model
from longtail.model.transformer import Transformer
from longtail.rl.data import tiny_task as task
from longtail.rl.data.examples import ExampleBatches, make_examples
from longtail.rl.data.prompts import Encoder, PromptSource
from longtail.rl.optim import OptimizerSettings
from longtail.rl.sft_learner import SftLearner, SftReport, SftSettings
from longtail.system.cache import build_once
from longtail.tiny import tokenizer

SOURCE = "tiny-reasoner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Hyperparameters of the warm start."""

    num_examples: int = 9_000
    steps: int = 450
    batch_tokens: int = 2048
    matrix_rate: float = 0.02
    learning_rate: float = 8e-3
    warmup_steps: int = 15
    autocast: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Progress of the warm start after one step.

    Example: Lesson(step=10, steps=600, num_tokens=19_000, seconds=1.4, report=report)
    """

    step: int
    steps: int
    num_tokens: int
    """Number of tokens trained on so far, prompts included."""
    seconds: float
    report: SftReport

    def line(self) -> str:
        """Return the progress as one line."""
        speed = self.num_tokens / max(self.seconds, 1e-9)
        return (
            f"warm start {self.step}/{self.steps}  loss {self.report.loss:.3f}  "
            f"{speed:,.0f} tokens/s  {self.seconds:.0f} s"
        )


def fresh(seed: int) -> Transformer:
    """Return the tiny reasoner with fresh weights."""
    model = Transformer(tiny.model_config())
    model.initialize(torch.Generator().manual_seed(seed))
    return model


def load_tokenizer() -> hf_tokenizer.Tokenizer:
    """Return the tiny reasoner's tokenizer."""
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.write(directory)
        return hf_tokenizer.load_tokenizer(directory)


def teach(
    recipe: Recipe, directory: Path, on_progress: Callable[[Lesson], None] | None = None
) -> None:
    """Train a fresh model and write it as a Hugging Face directory."""
    words = load_tokenizer()
    examples = make_examples(
        task.examples(recipe.num_examples, recipe.seed),
        source=SOURCE,
        encoder=Encoder(encode=words.encode, render=words.render),
        eos_id=words.eos_ids[0],
        max_len=tiny.model_config().max_positions,
    )
    batches = ExampleBatches(PromptSource(examples, seed=recipe.seed), recipe.batch_tokens)
    model = fresh(recipe.seed)
    imitator = SftLearner(model, _settings(recipe))
    began, num_tokens = time.perf_counter(), 0
    for step in range(1, recipe.steps + 1):
        report = imitator.step(batches.take())
        num_tokens += report.num_tokens
        if on_progress is not None:
            on_progress(
                Lesson(
                    step=step,
                    steps=recipe.steps,
                    num_tokens=num_tokens,
                    seconds=time.perf_counter() - began,
                    report=report,
                )
            )
    save_model(model, directory, eos_ids=words.eos_ids)
    words.save(directory)


def ensure(
    cache_dir: Path | str | None = None,
    on_progress: Callable[[Lesson], None] | None = None,
    recipe: Recipe | None = None,
) -> Path:
    """Return the directory of the trained model in `cache_dir`, by default the user's cache.

    The model is trained first if it is not there.
    """
    recipe = recipe or Recipe()
    return build_once(
        SOURCE, _digest(recipe), lambda path: teach(recipe, path, on_progress), cache_dir
    )


def _settings(recipe: Recipe) -> SftSettings:
    return SftSettings(
        optimizer=OptimizerSettings(
            learning_rate=recipe.learning_rate,
            schedule="cosine",
            warmup_steps=recipe.warmup_steps,
            total_steps=recipe.steps,
        ),
        matrix_rate=recipe.matrix_rate,
        tokens_per_micro_batch=recipe.batch_tokens,
        autocast=recipe.autocast,
    )


def _digest(recipe: Recipe) -> str:
    """Return a digest of what determines the weights: recipe, shape, source of task, tokenizer."""
    digest = hashlib.sha256(repr((asdict(recipe), tiny.model_config())).encode())
    for source in (task.__file__, tokenizer.__file__):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:16]
