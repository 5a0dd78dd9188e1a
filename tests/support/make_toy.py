"""Make the toy and its drafters, whose files are in tests/toy.

    PYTHONPATH=tests python -m support.make_toy

A supervised start on solved problems, float32, then bfloat16 weights; then each drafter learns
completions of that model for problems of the train split. It takes a few minutes on two CPU cores.

The tokenizer knows the whole words of the task, single digits and any ASCII. A digit after a space
is a token of its own, so a number is one token a digit and its first digit is marked. Text
round-trips exactly; a character beyond ASCII is `<unk>`.
"""

import json
import re
from pathlib import Path

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from longtail.config.sections import OptimizerSection
from longtail.config.sft import SftTrainSection
from longtail.drafter.eagle.fresh import fresh_drafter
from longtail.drafter.eagle.layer import EagleConfig, Recipe
from longtail.drafter.formats.checkpoint import TrainingRecord, identity, save_drafter
from longtail.drafter.training.texts import TextBatches, pack_texts, write_texts
from longtail.drafter.training.trainer import DrafterTrainer, TrainerSettings
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.model.hf.model import load_model, save_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.transformer import ModelConfig, Transformer
from longtail.rl.data.examples import Example, ExampleBatches, make_examples
from longtail.rl.data.prompts import Encoder, PromptSource
from longtail.rl.sft_learner import SftLearner
from longtail.types import SamplingParams
from support import toy_task as task
from support.toy import DRAFTERS, PROBLEMS, REASONER

PAD, EOS, UNKNOWN, USER, ASSISTANT = "<pad>", "<eos>", "<unk>", "<user>", "<assistant>"
THINK, END_OF_THINKING = "<think>", "</think>"
"""Ordinary tokens, so that they survive decoding: graders look for them."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{{ message['content'] }}<eos>"
    "{% else %}<user>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

_ASCII = ("\n", "\t", *(chr(code) for code in range(32, 127)))


def vocabulary() -> tuple[str, ...]:
    """Every token, in the order of its id."""
    words = {word for phrase in task.PHRASES for word in re.findall(r" ?[A-Za-z]+", phrase)}
    long_words = sorted(word for word in words if len(word) > 1)
    digits = [f" {digit}" for digit in range(10)]
    special = (PAD, EOS, UNKNOWN, USER, ASSISTANT, THINK, END_OF_THINKING)
    return (*special, *_ASCII, *digits, *long_words)


def _backend(tokens: tuple[str, ...]) -> Backend:
    backend = Backend(
        models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN)
    )
    words = [
        re.escape(token) for token in tokens if re.fullmatch(r" ?[A-Za-z]{2,}| [A-Za-z]", token)
    ]
    pattern = rf"(?:{'|'.join(words)})(?![A-Za-z])|{THINK}|{END_OF_THINKING}| [0-9]|[\s\S]"
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([PAD, EOS, UNKNOWN, USER, ASSISTANT])
    return backend


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, chat template included, into a directory."""
    _backend(vocabulary()).save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


SEED = 0
SHAPE = ModelConfig(
    family="qwen3",
    vocab_size=len(vocabulary()),
    hidden_size=128,
    intermediate_size=384,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_positions=4096,
    qk_norm=True,
    tied_embeddings=True,
)
NUM_EXAMPLES, STEPS, BATCH_TOKENS = 9_000, 450, 2048
WARM_START = SftTrainSection(
    learning_rate=8e-3,
    warmup_steps=15,
    steps=STEPS,
    tokens_per_micro_batch=BATCH_TOKENS,
    autocast=False,
)
DRAFTER_STEPS = {"eagle1": 400, "eagle3": 300}
DRAFTER_DEPTHS = {"eagle1": 2, "eagle3": 5}
DRAFTER_LAYERS = {"eagle1": (), "eagle3": (2, 4, 5)}
DRAFTER_TOKENS, DRAFTER_WINDOW = 384, 32
NUM_PROBLEMS, HELDOUT, MAX_TOKENS = 384, 32, 1024
MEASURED_DEPTHS = 6


def make_reasoner() -> None:
    """Train a fresh model on solved problems and write it in bfloat16."""
    REASONER.mkdir(exist_ok=True)
    write_tokenizer(REASONER)
    words = load_tokenizer(REASONER)
    examples = make_examples(
        task.examples(NUM_EXAMPLES, SEED),
        source="toy",
        encoder=Encoder(encode=words.encode, render=words.render),
        eos_id=words.eos_ids[0],
        max_len=SHAPE.max_positions,
    )
    batches = ExampleBatches(PromptSource(examples, seed=SEED), BATCH_TOKENS)
    model = Transformer(SHAPE)
    model.initialize(torch.Generator().manual_seed(SEED))
    learner = SftLearner(model, WARM_START, matrix_rate=0.02)
    for step in range(1, STEPS + 1):
        report = learner.step(batches.take())
        if step % 25 == 0:
            print(f"model {step}/{STEPS}  loss {report.loss:.3f}", flush=True)
    save_model(model.to(torch.bfloat16), REASONER, eos_ids=words.eos_ids)


def write_completions() -> list[Example]:
    """Return completions of the model, those of held-out problems first."""
    words = load_tokenizer(REASONER)
    rows = [*task.problems(HELDOUT, SEED, "heldout"), *task.problems(NUM_PROBLEMS, SEED, "train")]
    prompts = [words.chat(row["prompt"]) for row in rows]
    longest = max(map(len, prompts)) + MAX_TOKENS
    limits = EngineLimits(max_running=128, max_step_tokens=512, max_len=longest)
    engine = RolloutEngine(load_model(REASONER, torch.float32), words.decode, limits)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=words.eos_ids)
    return write_texts(engine.generate, prompts, sampling, samples=1, seed=SEED)


def make_drafter(recipe: Recipe, texts: list[Example]) -> None:
    """Train a drafter of the model on its texts and write it."""
    target = load_model(REASONER, torch.float32)  # not the engine's, which is packed
    target.fuse()
    config = EagleConfig(
        recipe=recipe, target=target.config, layers=DRAFTER_LAYERS[recipe], window=DRAFTER_WINDOW
    )
    heldout, learned = texts[:HELDOUT], texts[HELDOUT:]
    sample = pack_texts(learned[:16], DRAFTER_TOKENS)[0]
    layer = fresh_drafter(config, target, sample, torch.Generator().manual_seed(SEED))
    steps, num_tokens = DRAFTER_STEPS[recipe], 0
    settings = TrainerSettings(
        unroll_steps=DRAFTER_DEPTHS[recipe],
        optimizer=OptimizerSection(learning_rate=1e-2, schedule="cosine", warmup_steps=10),
        total_steps=steps,
        matrix_rate=0.03,
    )
    trainer = DrafterTrainer(layer, target, settings)
    batches = TextBatches(learned, DRAFTER_TOKENS, SEED)
    for step in range(1, steps + 1):
        report = trainer.step(pack_texts(batches.take(), DRAFTER_TOKENS))
        num_tokens += report.num_tokens
        if step % 25 == 0:
            print(f"{recipe} {step}/{steps}  loss {report.loss:.3f}", flush=True)
    depths = trainer.evaluate(pack_texts(heldout, 4096), MEASURED_DEPTHS)
    print(f"{recipe}: expected accept length {depths.accept_len:.2f}")
    record = TrainingRecord(
        steps=steps,
        tokens=num_tokens,
        unroll_steps=DRAFTER_DEPTHS[recipe],
        agreement=depths.agreement,
        overlap=depths.overlap,
        accept_len=depths.accept_len,
    )
    own = identity("toy", target, load_tokenizer(REASONER))
    save_drafter(DRAFTERS[recipe], layer.to(torch.bfloat16), None, own, record)


if __name__ == "__main__":
    rows = task.problems(64, SEED, "train")
    PROBLEMS.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    make_reasoner()
    completions = write_completions()
    make_drafter("eagle1", completions)
    make_drafter("eagle3", completions)
    total = sum(each.stat().st_size for each in Path(REASONER.parent).rglob("*") if each.is_file())
    print(f"{total / 1e6:.1f} MB in {REASONER.parent}")
