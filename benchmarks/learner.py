"""Seconds of one learner step, beside its matrix products and a loop of transformers.

    longtail       packed, sequences without an advantage left out, one update
    modelled       the same learner with the modelling code of transformers
    adapters       the same with adapters of rank 16 in its linear layers, which alone are trained
    products       its matrix products alone: forward, for inputs, for weights, each once
    transformers   a plain loop over the same sequences, sorted by length and padded

Texts are random tokens of heavy-tailed lengths; every second group of eight has an advantage. All
contestants take turns on the run's device, under bfloat16 autocast where the device is fast
in it. They train float32 weights with AdamW.
"""

from script import Json, Overrides, Repeats, Run, Threads, start

# isort: split

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, final, get_args

import torch
from pydantic import Field, dataclasses
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from longtail.bench.card import Spread, Table, numbers, print_card, progress, ratios
from longtail.config import files
from longtail.config.rl import LearnerSection, LoraSection, RunConfig, load
from longtail.model.hf.adapters import AdaptedModel
from longtail.model.hf.causal import CausalModel, read_pretrained
from longtail.model.hf.model import PolicyTransformer, load_model
from longtail.model.kernels.fixed_point import sum_bytes
from longtail.model.kernels.linear import Linear
from longtail.model.kernels.training_products import ROWS
from longtail.model.policy import Policy
from longtail.model.transformer import Transformer
from longtail.rl.learner import Learner
from longtail.rl.packing import pack_rollouts
from longtail.run.base_model import model_directory
from longtail.system.device import choose_device, multiplies_bfloat16, now, set_threads
from longtail.types import Completion, FinishReason, Prompt, Rollout, SamplingParams, TrainBatch

Rival = Literal["modelled", "adapters", "transformers"]
_GROUP = 8
"""Completions of a prompt."""
_LONGEST = 512
_PARTS = ("forward", "backward", "update")
Step = Callable[[], Mapping[str, float]]
"""A contestant's step, which returns the seconds of its parts, and `grad_norm`.

Example of a result: {"forward": 1.0, "backward": 2.1, "update": 0.4, "grad_norm": 1.5}
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A run, whose model and learner are measured, its texts, and the trainers compared."""

    run: Run = "smollm2"
    contestants: tuple[Rival, ...] = Field(
        get_args(Rival), description="beside longtail and its products; each holds a model"
    )
    mean_tokens: int = Field(116, ge=2, description="mean tokens of a completion")
    prompt_tokens: int = Field(40, ge=1, description="tokens of a prompt")
    repeats: Repeats = 3
    threads: Threads = 1
    json: Json = False
    overrides: Overrides = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Texts of one step with their advantages."""

    texts: Sequence[tuple[int, ...]]
    prompt_len: int
    advantages: Sequence[float]

    def packed(self, budget: int) -> TrainBatch:
        """Return the batch of the learner."""
        sampling = SamplingParams(max_tokens=_LONGEST)
        rollouts = [self._rollout(i) for i in range(len(self.texts))]
        return pack_rollouts(
            rollouts, self.advantages, sampling=sampling, budget=budget, keep_idle=False
        )

    def _rollout(self, index: int) -> Rollout:
        text = self.texts[index]
        prompt, ending = text[: self.prompt_len], text[self.prompt_len :]
        return Rollout(
            prompt=Prompt(prompt_id=str(index // _GROUP), tokens=prompt, text=""),
            completion=Completion(
                request_id=str(index),
                tokens=ending,
                logprobs=(-10.0,) * len(ending),
                text="",
                finish_reason=FinishReason.STOP,
                policy_version=0,
            ),
            reward=0.0,
        )

    def padded(self, budget: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return tokens, mask and advantages of micro-batches of texts of similar lengths.

        Texts without an advantage are left out.
        """
        kept = [i for i, advantage in enumerate(self.advantages) if advantage]
        cuts: list[list[int]] = [[]]
        for index in sorted(kept, key=lambda i: len(self.texts[i])):
            if cuts[-1] and (len(cuts[-1]) + 1) * len(self.texts[index]) > budget:
                cuts.append([])
            cuts[-1].append(index)
        return [self._padded(members) for members in cuts]

    def _padded(self, members: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        texts = [torch.tensor(self.texts[i]) for i in members]
        mask = [torch.ones_like(each) for each in texts]
        advantages = torch.tensor([self.advantages[i] for i in members])
        tokens, weights = (pad_sequence(each, batch_first=True) for each in (texts, mask))
        return tokens, weights, advantages


def make_batch(options: Options, count: int, vocab_size: int) -> StepBatch:
    """Return random tokens of heavy-tailed lengths, the same every time.

    Every second group has advantages.
    """
    generator = torch.Generator().manual_seed(0)
    factors = torch.tensor([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]).exp()
    lengths = factors / factors.mean() * options.mean_tokens
    lengths = lengths.round().clamp(2, _LONGEST).int() + options.prompt_tokens
    order = torch.randperm(count, generator=generator)
    texts = [
        tuple(torch.randint(vocab_size, (size,), generator=generator).tolist())
        for size in lengths[order].tolist()
    ]
    advantages = [0.0 if i // _GROUP % 2 else 1.0 if i % 2 else -1.0 for i in range(count)]
    return StepBatch(texts=texts, prompt_len=options.prompt_tokens, advantages=advantages)


@final
class Products:
    """The matrix products of a step, with nothing between them."""

    def __init__(self, model: Transformer, batch: TrainBatch) -> None:
        layers = [m for m in model.modules() if isinstance(m, Linear) and m is not model.head]
        self._device = model.device
        autocasts = multiplies_bfloat16(model.device)
        self._dtype = torch.bfloat16 if autocasts else torch.float32
        self._layers = [each.weight.detach().to(self._dtype) for each in layers]
        self._head = model.head.weight.detach().to(self._dtype)
        self._rows = [one.packed.num_tokens for one in batch.micro_batches]
        self._scored = [int(one.packed.loss_mask.sum()) for one in batch.micro_batches]
        self._inputs: dict[tuple[int, int], Tensor] = {}

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        inside = sum(weight.numel() for weight in self._layers)
        return 6.0 * (sum(self._rows) * inside + sum(self._scored) * self._head.numel())

    def run(self) -> dict[str, float]:
        """Compute each micro-batch: results, gradients of inputs and of weights."""
        for tokens, scored in zip(self._rows, self._scored, strict=True):
            for weight in self._layers:
                self._compute(weight, tokens)
            self._compute(self._head, scored)
        now(self._device)
        return {}

    def _compute(self, weight: Tensor, rows: int) -> None:
        x, grad = (self._input(rows, size) for size in reversed(weight.shape))
        torch.mm(x, weight.t())
        torch.mm(grad, weight)
        torch.mm(grad.t(), x)

    def _input(self, rows: int, size: int) -> Tensor:
        """Return numbers of some size, made once; rows as the learner pads them."""
        rows = -(-rows // ROWS) * ROWS
        if (rows, size) not in self._inputs:
            self._inputs[rows, size] = torch.randn(rows, size, device=self._device).to(self._dtype)
        return self._inputs[rows, size]


@final
class Reference:
    """The GRPO loss with the model of transformers, in a plain loop over padded micro-batches."""

    def __init__(
        self, directory: Path, batch: StepBatch, section: LearnerSection, device: torch.device
    ) -> None:
        self._model = read_pretrained(directory, torch.float32, device).train()
        self._batches, self._count = batch.padded(section.tokens_per_micro_batch), len(batch.texts)
        self._prompt_len, self._device = batch.prompt_len, device
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=1e-6, weight_decay=0.0, fused=True
        )

    def step(self) -> dict[str, float]:
        """Make one update; return the seconds of its parts and the norm of the gradient."""
        forward = backward = 0.0
        for micro_batch in self._batches:
            start = now(self._device)
            tokens, mask, advantages = (each.to(self._device) for each in micro_batch)
            autocasts = multiplies_bfloat16(self._device)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=autocasts):
                loss = self._loss(tokens, mask, advantages)
            middle = now(self._device)
            loss.backward()  # type: ignore[no-untyped-call]
            forward += middle - start
            backward += now(self._device) - middle
        start = now(self._device)
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        parts = {"forward": forward, "backward": backward, "update": now(self._device) - start}
        return {**parts, "grad_norm": float(norm)}

    def _loss(self, tokens: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        ids, weights = tokens[:, self._prompt_len :], mask[:, self._prompt_len :]
        logits = self._model(
            input_ids=tokens, attention_mask=mask, logits_to_keep=ids.shape[1] + 1, use_cache=False
        ).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, :, None])[:, :, 0]
        ratio = (logprobs - logprobs.detach()).exp()
        terms = -ratio * advantages[:, None] * weights
        return (terms.sum(1) / weights.sum(1)).sum() / self._count


def own_step(learner: Learner, packed: TrainBatch) -> dict[str, float]:
    """Make an update of longtail's learner; return what `Reference.step` does."""
    report = learner.step([packed])
    seconds = report.seconds
    return {
        "forward": seconds["logprob"],
        "backward": seconds["backward"],
        "update": seconds["update"] - seconds["backward"],
        "grad_norm": report.metrics["actor/grad_norm"],
    }


def policies(model: PolicyTransformer, directory: Path, names: Sequence[str]) -> dict[str, Policy]:
    """Return a model as longtail's learner trains it: by our decoder, and by transformers' code."""
    found: dict[str, Policy] = {"longtail": model}
    if "modelled" in names:
        found["modelled"] = CausalModel(read_pretrained(directory, torch.float32, model.device))
    if "adapters" in names:
        read = read_pretrained(directory, torch.float32, model.device)
        found["adapters"] = AdaptedModel(read, LoraSection(), seed=0)
    return found


def run(options: Options) -> int:
    """Measure in turn, print the card and JSON."""
    set_threads(options.threads)
    log = progress("learner")
    config = load(files.locate(options.run), options.overrides)
    directory = model_directory(config.model.path, log)
    device = choose_device(config.run.device)
    model = load_model(directory, torch.float32, device)
    completions = config.rollout.prompts_per_step * config.rollout.group_size
    batch = make_batch(options, completions, model.config.vocab_size)
    packed = batch.packed(config.learner.tokens_per_micro_batch)
    products = Products(model, packed)
    # what the loop of transformers computes
    same = {"autocast": multiplies_bfloat16(device), "loss": "grpo"}
    section = config.learner.model_copy(update=same)
    chosen = policies(model, directory, options.contestants)
    learners = {name: Learner(each, section) for name, each in chosen.items()}
    contestants: dict[str, Step] = {
        name: partial(own_step, each, packed) for name, each in learners.items()
    }
    contestants["products"] = products.run
    if "transformers" in options.contestants:
        contestants["transformers"] = Reference(directory, batch, section, device).step
    log("measuring")
    measured = measure(contestants, options.repeats)
    result = _result(config, packed, products.flops, measured)
    result["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    result["state_mb"] = {name: _bytes(each, section) / 1e6 for name, each in chosen.items()}
    state = ", ".join(f"{size:,.0f} MB ({name})" for name, size in result["state_mb"].items())
    sentences = [
        f"A step takes {result['over_products']['median']:.2f} times as long as its products "
        f"alone ({result['products_gflops']:,.0f} GFLOP/s).",
        f"Weights, gradients and moments take {state}.",
    ]
    print_card([_table(result, measured)], result, sentences=sentences, json_only=options.json)
    return 0


def _bytes(model: Policy, own: LearnerSection) -> int:
    """Return the bytes of the weights, and of the sums of their gradients and the moments."""
    return sum(each.nbytes for each in model.parameters()) + sum(
        2 * each.nbytes + sum_bytes(each.dtype, exact=own.sums != "float") * each.numel()
        for each in model.trainable().values()
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """Turns of all contestants."""

    seconds: Mapping[str, Sequence[float]]
    steps: Mapping[str, Sequence[Mapping[str, float]]]
    """Results of the steps; the first is the warm-up."""

    def spread(self, name: str, part: str) -> Spread | None:
        """Return the seconds of a part of a contestant's steps; None if it has no such part."""
        found = [each[part] for each in self.steps[name][1:] if part in each]
        return Spread.of(found) if found else None


def measure(contestants: Mapping[str, Step], repeats: int) -> Measured:
    """Make the steps of all contestants in turns, after one that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    steps: dict[str, list[Mapping[str, float]]] = {name: [] for name in contestants}
    for turn in range(1 + repeats):
        for name, step in contestants.items():
            start_s = time.perf_counter()
            steps[name].append(step())
            if turn:
                seconds[name].append(time.perf_counter() - start_s)
    return Measured(seconds, steps)


def _table(result: Mapping[str, Any], measured: Measured) -> Table:
    """Return a line for each contestant."""
    seconds = measured.seconds
    title = "learner, {model}: {num_tokens} tokens, {num_scored} scored; micro-batches: "
    return Table(
        f"{title}{{micro_batches}}; {{device}}".format(**result),
        ("", "step s", *(f"{part} s" for part in _PARTS), "over longtail"),
        [
            (
                name,
                Spread.of(own),
                *(measured.spread(name, part) for part in _PARTS),
                ratios(own, seconds["longtail"]),
            )
            for name, own in seconds.items()
        ],
    )


def _result(
    config: RunConfig, packed: TrainBatch, flops: float, measured: Measured
) -> dict[str, Any]:
    """Return the JSON."""
    seconds = measured.seconds
    over = {name: ratios(own, seconds["longtail"]).numbers() for name, own in seconds.items()}
    parts = {
        name: {part: own for part in _PARTS if (own := measured.spread(name, part))}
        for name in seconds
    }
    return {
        "bench": "learner",
        "model": config.model.path,
        "budget": config.learner.tokens_per_micro_batch,
        "num_tokens": sum(one.packed.num_tokens for one in packed.micro_batches),
        "num_scored": sum(int(one.packed.loss_mask.sum()) for one in packed.micro_batches),
        "micro_batches": len(packed.micro_batches),
        "seconds": {name: Spread.of(own).numbers() for name, own in seconds.items()},
        "parts": {name: numbers(own) for name, own in parts.items() if own},
        "over_products": ratios(seconds["longtail"], seconds["products"]).numbers(),
        "products_share": over["products"],
        "products_gflops": flops / Spread.of(seconds["products"]).median / 1e9,
        **{f"{name}_ratio": over.get(name) for name in get_args(Rival)},
        "grad_norm": {name: own[0]["grad_norm"] for name, own in measured.steps.items() if own[0]},
        "transformers": metadata.version("transformers"),
    }


if __name__ == "__main__":
    sys.exit(start(Options, run))
