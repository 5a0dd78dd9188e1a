"""Make the weights, the drafters and the problems of tests/toy anew, in a few minutes on two cores.

    PYTHONPATH=tests python benchmarks/make_toy.py

The task is to count the steps of a hailstone sequence, in writing: an even number is followed by
its half, an odd one by three times it plus one, until 1. The number of steps cannot be predicted
from the start (26 takes 10, 27 takes 111), so answers are as heavy-tailed as real reasoning.
Solutions are of two kinds, as in the training data of a base model: careful ones count to the end,
hasty ones stop early and guess. The model's shape and its tokenizer are files that stay.
"""

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Any

import torch

from longtail.cli.main import main
from longtail.config.sft import SftTrainSection
from longtail.drafter.formats.checkpoint import LoadedDrafter, identity, load_drafter
from longtail.model.hf.model import PolicyTransformer, load_config, load_model, save_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.rl.data.examples import ExampleBatches, make_examples
from longtail.rl.data.prompts import Encoder
from longtail.rl.optim import Optimizer
from longtail.rl.sft_learner import SftLearner
from longtail.run.drafter_store import drafter_directory
from support.toy import DRAFTERS, PROBLEMS, REASONER

NUM_EXAMPLES, STEPS, NUM_PROMPTS = 9_000, 450, 416
MAX_START, MAX_VALUE, MAX_STEPS, STRATA = 999, 9999, 118, 16
LENGTHS = NormalDist(math.log(11), 1.4)
"""Distribution of the logarithm of the number of steps."""
QUESTIONS = (
    *("How many steps does {} take to reach 1?", "How many steps from {} to 1?"),
    *("Start at {}. How many steps until 1?", "Count the steps of {} until 1."),
)
OPENERS = {True: "Let me go step by step.", False: "Let me be quick."}
GUESSES = ("I am tired, I guess {}.", "And so on, maybe {}.", "That is enough, {}.")
FULL = ("{n} is {parity}, {how} {m}", "now {n} {parity}, {how} {m}", "the {parity} {n}, {how} {m}")
TERSE = ("{parity}, {m}", "{parity} so {m}", "{parity} to {m}")
OPTIONS = {
    "eagle1": ("--train.steps=400",),
    "eagle3": ("--train.steps=300", "--drafter.layers=2,4,5"),
}


def walk(start: int) -> list[int]:
    """Return the sequence to 1, as walk(6) == [6, 3, 10, 5, 16, 8, 4, 2, 1], which is 8 steps."""
    numbers = [start]
    while numbers[-1] != 1:
        numbers.append(3 * numbers[-1] + 1 if numbers[-1] % 2 else numbers[-1] // 2)
    return numbers


def starts(rng: Random) -> Iterator[int]:
    """Draw starts without end; each 16 in a row span the whole distribution of lengths."""
    walks = [walk(start) for start in range(2, MAX_START + 1)]
    steps = {w[0]: len(w) - 1 for w in walks if max(w) <= MAX_VALUE and len(w) - 1 <= MAX_STEPS}
    while True:
        for stratum in rng.sample(range(STRATA), STRATA):
            wanted = math.exp(LENGTHS.inv_cdf((stratum + max(rng.random(), 1e-9)) / STRATA))
            nearest = min(abs(length - wanted) for length in steps.values())
            yield rng.choice([n for n, length in steps.items() if abs(length - wanted) == nearest])


def problems(size: int, seed: int) -> list[dict[str, Any]]:
    """Draw problems."""
    rng = Random(seed)
    rows = []
    for number, start in zip(range(size), starts(rng), strict=False):
        question = {"role": "user", "content": rng.choice(QUESTIONS).format(start)}
        answer, name = str(len(walk(start)) - 1), f"hailstone/{start}/{number}"
        rows.append({"prompt": [question], "answer": answer, "problem_id": name})
    return rows


def line(n: int, talkative: float, rng: Random) -> str:
    """Return the text of one step, without its count."""
    parity, how = ("odd", "triple plus one") if n % 2 else ("even", "half is")
    form = rng.choice(FULL if rng.random() < talkative else TERSE)
    return form.format(n=n, m=walk(n)[1], parity=parity, how=how)


def drill(rng: Random) -> dict[str, Any]:
    """Return a problem of one step, with small numbers more likely."""
    number = int(math.exp(rng.uniform(math.log(2), math.log(MAX_VALUE / 3))))
    text = f"0: {number}\n1: {line(number, rng.random(), rng)}"
    return {
        "prompt": [{"role": "user", "content": f"What comes after {number}?"}],
        "completion": f"<think>\n{text}\n</think>\n{walk(number)[1]}.",
    }


def solution(start: int, rng: Random) -> str:
    """Return a worked solution; a hasty one mostly ends early, in a guess."""
    careful, talkative, numbers = rng.random() < 0.4, rng.choice((0.1, 0.5, 0.9)), walk(start)
    answer, tiring = len(numbers) - 1, 0.002 if careful else rng.choice((0.15, 0.3))
    lines = ["<think>", OPENERS[careful], f"0: {start}"]
    for count, number in enumerate(numbers[:-1], 1):
        lines.append(f"{count}: {line(number, talkative, rng)}")
        if count < len(numbers) - 1 and rng.random() < tiring:
            answer = count + rng.randint(2, 20)
            lines.append(rng.choice(GUESSES).format(answer))
            break
    return "\n".join([*lines, "</think>", f"The answer is {answer}."])


def make_reasoner() -> None:
    """Train a fresh model on solved problems and write it in bfloat16."""
    words, rng = load_tokenizer(REASONER), Random(1)
    rows = problems(NUM_EXAMPLES // 2, seed=1)
    for row in rows:
        row["completion"] = solution(int(row["problem_id"].split("/")[1]), rng)
    rows += [drill(rng) for _ in rows]
    model = PolicyTransformer(load_config(REASONER))
    examples, _ = make_examples(
        rows,
        source="toy",
        encoder=Encoder.of(words),
        ends=words.ends,
        max_len=model.config.max_positions,
    )
    batches = ExampleBatches(examples, 2048, seed=0)
    model.initialize(torch.Generator().manual_seed(0))
    settings = SftTrainSection(
        learning_rate=8e-3,
        warmup_steps=15,
        steps=STEPS,
        tokens_per_micro_batch=2048,
        autocast=False,
    )
    learner: Any = SftLearner(model, settings)
    named = dict(model.named_parameters())
    learner._optimizer = Optimizer(
        named.items(),
        settings,
        total_steps=STEPS,
        matrices=[name for name, p in named.items() if p.dim() == 2 and "layers." in name],
        matrix_rate=0.02,
    )
    for step in range(1, STEPS + 1):
        loss = learner.step(batches.take())["train/loss"]
        print(f"model {step}/{STEPS}  loss {loss:.3f}", flush=True)
    save_model(model.to(torch.bfloat16), REASONER, eos_ids=words.eos_ids)


def make_drafter(recipe: str, folder: Path) -> None:
    """Train a drafter on the model's own texts and write it in bfloat16."""
    prompts, run = folder / "prompts.jsonl", folder / recipe
    write(prompts, problems(NUM_PROMPTS, seed=2))
    words = (f"--target.path={REASONER}", f"--data.source={prompts}", f"--run.dir={run}")
    more = (
        *("--data.max_tokens=1024", "--train.batch_tokens=384", "--drafter.window=32"),
        *("--target.dtype=float32", "--train.autocast=false", *OPTIONS[recipe]),
    )
    if main(["drafter", "train", f"--drafter.recipe={recipe}", *words, *more]):
        raise SystemExit(f"training {recipe} failed")
    target, tokenizer = load_model(REASONER, torch.float32), load_tokenizer(REASONER)
    made = load_drafter(drafter_directory(run), target, tokenizer, strict_weights=True)
    own = identity("toy", target, tokenizer)
    LoadedDrafter(
        layer=made.layer.to(torch.bfloat16), draft_ids=None, trained_on=own, training=made.training
    ).save(DRAFTERS[recipe])


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write(PROBLEMS, problems(64, seed=0))
    make_reasoner()
    with tempfile.TemporaryDirectory() as place:
        for each in OPTIONS:
            make_drafter(each, Path(place))
