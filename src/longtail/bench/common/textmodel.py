"""A model of ordinary text and its drafter, trained on this machine.

The tiny reasoner's text has little entropy, but the effect of coupled drafting shows on text with
some. So a small decoder is trained on the sources of Python's standard library, an EAGLE-3 drafter
on completions of that decoder at temperature 1, and both are cached:

    *.py --> BPE tokens --> windows --SftLearner--> target --writes--> texts
                               |                    |                  |  DrafterTrainer
                               +-> held-out files   +--> features --> drafter

The names of the directories are digests of everything that determines the weights: recipes and
text. Each is written beside its place and renamed, so one that exists is whole.
"""

import hashlib
import json
import os
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from longtail.bench.common.process import Log
from longtail.drafter.eagle.fresh import fresh_drafter
from longtail.drafter.eagle.layer import EagleConfig
from longtail.drafter.formats.checkpoint import TrainingRecord, identity, save_drafter
from longtail.drafter.training.texts import TextBatches, pack_texts, write_texts
from longtail.drafter.training.trainer import DrafterTrainer, TrainerSettings
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.model.hf.model import load_model, save_model
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.model.transformer import ModelConfig, Transformer
from longtail.rl.data.examples import Example
from longtail.rl.optim import OptimizerSettings
from longtail.rl.sft_learner import SftLearner, SftSettings
from longtail.system.cache import build_once
from longtail.system.device import multiplies_bfloat16
from longtail.types import SamplingParams

NAME = "text-model"
EOS = "<eos>"
PROMPT_LEN = 32
_HELD_OUT = 20
"""One file in this number is held out."""
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings"}
"""Directories outside the library, or with tables rather than text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRecipe:
    """Hyperparameters of the target."""

    megabytes: float = 5.0
    vocab_size: int = 2048
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 4
    head_dim: int = 64
    window: int = 256
    steps: int = 440
    batch_tokens: int = 2048
    matrix_rate: float = 0.02
    learning_rate: float = 8e-3
    warmup_steps: int = 15
    autocast: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRecipe:
    """Hyperparameters of the drafter."""

    layers: tuple[int, ...] = (2, 4, 5)
    window: int = 64
    unroll_steps: int = 5
    texts: int = 768
    temperatures: tuple[float, ...] = (1.0,)
    """Sampling temperatures of the texts, in turn."""
    text_len: int = 256
    steps: int = 750
    batch_tokens: int = 512
    matrix_rate: float = 0.03
    learning_rate: float = 1e-2
    warmup_steps: int = 10
    autocast: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """Directories of the model and its drafter.

    Example: TextModel(target=Path(".../target-1f0c"), drafter=Path(".../drafter-77ab"))
    """

    target: Path
    """Hugging Face directory."""
    drafter: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Texts of files, learned and held out."""

    learned: tuple[str, ...]
    heldout: tuple[str, ...]

    def digest(self) -> str:
        """Return a digest of all texts."""
        return hashlib.sha256("\0".join((*self.learned, "", *self.heldout)).encode()).hexdigest()


def read_sources(megabytes: float, root: Path | None = None) -> Sources:
    """Read up to `megabytes` of the standard library's modules, in the order of their names."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in _LEFT_OUT]
        files += [Path(folder) / name for name in names if name.endswith(".py")]
    texts: list[str] = []
    room = megabytes * 1e6
    for file in sorted(files):
        raw = file.read_bytes()
        room -= len(raw)
        if texts and room < 0:
            break
        texts.append(raw.decode("utf-8", errors="replace"))
    return Sources(
        learned=tuple(text for i, text in enumerate(texts) if i % _HELD_OUT != _HELD_OUT - 1),
        heldout=tuple(text for i, text in enumerate(texts) if i % _HELD_OUT == _HELD_OUT - 1),
    )


def write_tokenizer(texts: Sequence[str], vocab_size: int, directory: Path) -> None:
    """Train a byte-level BPE tokenizer and write it as Hugging Face files."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def cut_windows(texts: Sequence[str], tokenizer: Tokenizer, window: int) -> list[tuple[int, ...]]:
    """Concatenate texts, each with an end-of-text token, and cut whole windows."""
    stream: list[int] = []
    for text in texts:
        stream += (*tokenizer.encode(text), tokenizer.eos_ids[0])
    return [tuple(stream[i : i + window]) for i in range(0, len(stream) - window + 1, window)]


def train_target(recipe: TargetRecipe, sources: Sources, place: Path, log: Log) -> None:
    """Train on the text and write a Hugging Face directory."""
    began = time.perf_counter()
    write_tokenizer(sources.learned, recipe.vocab_size, place)
    tokenizer = load_tokenizer(place)
    windows = cut_windows(sources.learned, tokenizer, recipe.window)
    examples = [Example(tokens=window, prompt_len=1) for window in windows]
    model = Transformer(_shape(recipe, tokenizer.vocab_size))
    model.initialize(torch.Generator().manual_seed(recipe.seed))
    learner = SftLearner(
        model,
        SftSettings(
            optimizer=_schedule(recipe),
            matrix_rate=recipe.matrix_rate,
            tokens_per_micro_batch=recipe.batch_tokens,
            autocast=recipe.autocast and multiplies_bfloat16(torch.device("cpu")),
        ),
    )
    batches = TextBatches(examples, recipe.batch_tokens, recipe.seed)
    for step in range(1, recipe.steps + 1):
        report = learner.step(batches.take())
        seconds = time.perf_counter() - began
        log(f"text model {step}/{recipe.steps}  loss {report.loss:.3f}  {seconds:.0f} s")
    unseen = cut_windows(sources.heldout, tokenizer, recipe.window)[:256]
    loss = learner.loss([Example(tokens=window, prompt_len=1) for window in unseen])
    log(f"text model  held-out loss {loss:.3f}  {time.perf_counter() - began:.0f} s")
    save_model(model, place, eos_ids=tokenizer.eos_ids)


def train_drafter(
    recipe: DrafterRecipe, sources: Sources, target_directory: Path, place: Path, log: Log
) -> None:
    """Train on completions of the target and write a drafter directory."""
    began = time.perf_counter()
    tokenizer = load_tokenizer(target_directory)
    texts = _write(recipe, sources, target_directory, tokenizer)
    heldout, learned = texts[: len(texts) // 32], texts[len(texts) // 32 :]
    log(f"text model's drafter  {len(texts)} texts  {time.perf_counter() - began:.0f} s")
    target = load_model(target_directory, torch.float32)  # not the engine's, which is packed
    target.fuse()
    config = EagleConfig(
        recipe="eagle3", target=target.config, layers=recipe.layers, window=recipe.window
    )
    sample = pack_texts(learned[:16], recipe.batch_tokens)[0]
    generator = torch.Generator().manual_seed(recipe.seed)
    layer = fresh_drafter(config, target, sample, generator)
    settings = TrainerSettings(
        unroll_steps=recipe.unroll_steps,
        optimizer=_schedule(recipe),
        matrix_rate=recipe.matrix_rate,
        autocast=recipe.autocast and multiplies_bfloat16(torch.device("cpu")),
    )
    trainer = DrafterTrainer(layer, target, settings)
    batches = TextBatches(learned, recipe.batch_tokens, recipe.seed)
    num_tokens = 0
    for step in range(1, recipe.steps + 1):
        report = trainer.step(pack_texts(batches.take(), recipe.batch_tokens))
        num_tokens += report.num_tokens
        seconds = time.perf_counter() - began
        log(
            f"text model's drafter {step}/{recipe.steps}  loss {report.loss:.3f}  expected accept "
            f"length {report.depths.accept_len:.2f}  {seconds:.0f} s"
        )
    depths = trainer.evaluate(pack_texts(heldout, 4096))
    log(f"text model's drafter  held-out accept length {depths.accept_len:.2f}")
    record = TrainingRecord(
        steps=recipe.steps,
        tokens=num_tokens,
        unroll_steps=recipe.unroll_steps,
        agreement=depths.agreement,
        overlap=depths.overlap,
        accept_len=depths.accept_len,
    )
    save_drafter(place, layer, None, identity(NAME, target, tokenizer), record)


def ensure(
    on_progress: Log | None = None,
    cache_dir: Path | str | None = None,
    *,
    target: TargetRecipe | None = None,
    drafter: DrafterRecipe | None = None,
    root: Path | None = None,
) -> TextModel:
    """Return the directories of the model and its drafter, training them on the first use.

    They are in `cache_dir`, else in the user's cache. `root` replaces the standard library.
    """
    log = on_progress or (lambda line: None)
    target, drafter = target or TargetRecipe(), drafter or DrafterRecipe()
    sources = read_sources(target.megabytes, root)
    target_place = build_once(
        NAME,
        f"target-{_digest(target, sources.digest())}",
        lambda path: train_target(target, sources, path, log),
        cache_dir,
    )
    drafter_place = build_once(
        NAME,
        f"drafter-{_digest(drafter, target_place.name)}",
        lambda path: train_drafter(drafter, sources, target_place, path, log),
        cache_dir,
    )
    return TextModel(target=target_place, drafter=drafter_place)


def heldout_prompts(
    model: TextModel, count: int, recipe: TargetRecipe | None = None, root: Path | None = None
) -> list[tuple[int, ...]]:
    """Return beginnings of held-out text, spread over the files."""
    recipe = recipe or TargetRecipe()
    tokenizer = load_tokenizer(model.target)
    sources = read_sources(recipe.megabytes, root)
    windows = cut_windows(sources.heldout, tokenizer, recipe.window)
    return _beginnings(windows, count)


def _write(
    recipe: DrafterRecipe, sources: Sources, directory: Path, tokenizer: Tokenizer
) -> list[Example]:
    """Return the target's completions of beginnings of its training text."""
    windows = cut_windows(sources.learned, tokenizer, recipe.text_len)
    beginnings = _beginnings(windows, recipe.texts)
    limits = EngineLimits(max_running=64, max_step_tokens=512, max_len=recipe.text_len)
    engine = RolloutEngine(load_model(directory, torch.float32), tokenizer.decode, limits)
    by_temperature = [
        write_texts(
            engine.generate,
            beginnings[turn :: len(recipe.temperatures)],
            SamplingParams(temperature=temperature, max_tokens=recipe.text_len - PROMPT_LEN),
            samples=1,
            seed=recipe.seed,
        )
        for turn, temperature in enumerate(recipe.temperatures)
    ]
    return [text for turn in zip(*by_temperature, strict=False) for text in turn]


def _beginnings(windows: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    stride = max(1, len(windows) // count)
    return [window[:PROMPT_LEN] for window in windows[::stride][:count]]


def _shape(recipe: TargetRecipe, vocab_size: int) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=3 * recipe.hidden_size,
        num_layers=recipe.num_layers,
        num_heads=recipe.num_heads,
        num_kv_heads=recipe.num_heads // 2,
        head_dim=recipe.head_dim,
        max_positions=4096,
        qk_norm=True,
        tied_embeddings=True,
    )


def _schedule(recipe: TargetRecipe | DrafterRecipe) -> OptimizerSettings:
    return OptimizerSettings(
        learning_rate=recipe.learning_rate,
        schedule="cosine",
        warmup_steps=recipe.warmup_steps,
        total_steps=recipe.steps,
    )


def _digest(recipe: TargetRecipe | DrafterRecipe, origin: str) -> str:
    return hashlib.sha256(repr((asdict(recipe), origin)).encode()).hexdigest()[:16]
