"""`longtail bench learner`: one step beside its matrix products and other trainers.

    longtail       packed, sequences without an advantage left out, one update
    modelled       the same learner with the modelling code of transformers
    adapters       the same with adapters of rank 16 in its linear layers, which alone are trained
    products       its matrix products alone: forward, for inputs, for weights, each once
    transformers   a plain loop over the same sequences, sorted by length and padded
    trl            TRL's loss over the whole batch, eight sequences at a time, as it would

Texts are random tokens of heavy-tailed lengths; every second group of eight has an advantage. All
contestants take turns on the run's device, under bfloat16 autocast where it multiplies it.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, final

import torch
from torch import Tensor

from longtail.assembly.engine import model_directory
from longtail.bench.common.card import Table, numbers, print_card
from longtail.bench.common.peers import PeerProcess
from longtail.bench.common.timing import Spread, paired, progress, ratios
from longtail.bench.options import LearnerBenchOptions
from longtail.config import files
from longtail.config.rl import LoraSection, RunConfig, load
from longtail.model.hf.adapters import AdaptedModel
from longtail.model.hf.causal import CausalModel, read_pretrained
from longtail.model.hf.model import PolicyTransformer, load_model
from longtail.model.kernels.linear import Linear
from longtail.model.kernels.products import ROWS
from longtail.model.policy import Policy
from longtail.model.transformer import Transformer
from longtail.rl.learner import Learner
from longtail.rl.learner_metrics import LearnerReport
from longtail.rl.packing import pack_rollouts
from longtail.system.device import choose_device, multiplies_bfloat16, now, set_threads
from longtail.types import Completion, FinishReason, Prompt, Rollout, SamplingParams, TrainBatch

_GROUP = 8
"""Completions of a prompt, and TRL's default number of sequences of a micro-batch."""
_LONGEST = 512
_SIGMA = 1.0
_PARTS = ("forward", "backward", "update")
_WORKER = Path(__file__).with_name("learner_worker.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Texts of one step with their advantages.

    Example: StepBatch(texts=((1, 2, 3), (1, 2)), prompt_lens=(1, 1), advantages=(1.0, 0.0))
    """

    texts: Sequence[tuple[int, ...]]
    prompt_lens: Sequence[int]
    advantages: Sequence[float]

    @property
    def kept(self) -> list[int]:
        """Indices of the texts with an advantage."""
        return [i for i, advantage in enumerate(self.advantages) if advantage]

    def packed(self, budget: int) -> TrainBatch:
        """Return the batch of the learner."""
        sampling = SamplingParams(max_tokens=_LONGEST)
        rollouts = [self._rollout(i) for i in range(len(self.texts))]
        return pack_rollouts(
            rollouts, self.advantages, sampling=sampling, budget=budget, keep_idle=False
        )

    def _rollout(self, index: int) -> Rollout:
        text, prompt_len = self.texts[index], self.prompt_lens[index]
        prompt, ending = text[:prompt_len], text[prompt_len:]
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

    def turn(self, indices: Sequence[int], batches: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the job of `learner_worker` for some texts; `batches` index into them."""
        return {
            "texts": [list(self.texts[i]) for i in indices],
            "prompt_lens": [self.prompt_lens[i] for i in indices],
            "advantages": [self.advantages[i] for i in indices],
            "batches": [list(members) for members in batches],
            "num_sequences": len(self.texts),
        }


def make_texts(
    count: int, mean_tokens: int, prompt_tokens: int, vocab_size: int
) -> list[tuple[int, ...]]:
    """Return texts of random tokens and heavy-tailed lengths, the same every time."""
    generator, normal = torch.Generator().manual_seed(0), NormalDist(sigma=_SIGMA)
    factors = torch.tensor([normal.inv_cdf((i + 0.5) / count) for i in range(count)]).exp()
    lengths = (factors / factors.mean() * mean_tokens).round().clamp(2, _LONGEST).int()
    order = torch.randperm(count, generator=generator)
    return [
        tuple(torch.randint(vocab_size, (size,), generator=generator).tolist())
        for size in (lengths[order] + prompt_tokens).tolist()
    ]


def make_batch(options: LearnerBenchOptions, count: int, vocab_size: int) -> StepBatch:
    """Return random texts with advantages in every second group."""
    prompt_len = options.prompt_tokens
    texts = make_texts(count, options.mean_tokens, prompt_len, vocab_size)
    advantages = [0.0 if i // _GROUP % 2 else 1.0 if i % 2 else -1.0 for i in range(count)]
    return StepBatch(texts=texts, prompt_lens=[prompt_len] * count, advantages=advantages)


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

    def run(self) -> None:
        """Compute each micro-batch: results, gradients of inputs and of weights."""
        for tokens, scored in zip(self._rows, self._scored, strict=True):
            for weight in self._layers:
                self._compute(weight, tokens)
            self._compute(self._head, scored)
        now(self._device)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Turns of all contestants; reports and answers begin with the warm-up."""

    seconds: Mapping[str, Sequence[float]]
    reports: Mapping[str, Sequence[LearnerReport]]
    """Reports of longtail's learners by name."""
    answers: Mapping[str, Sequence[Mapping[str, float]]]
    """Answers of `learner_worker` by kind."""
    descriptions: Mapping[str, str]
    device: str

    @property
    def parts(self) -> dict[str, dict[str, Spread]]:
        """Seconds of each part of a step."""
        return {
            **{
                name: {
                    "forward": Spread.of([each.logprob_seconds for each in own[1:]]),
                    "backward": Spread.of([each.backward_seconds for each in own[1:]]),
                    "update": Spread.of(
                        [each.update_seconds - each.backward_seconds for each in own[1:]]
                    ),
                }
                for name, own in self.reports.items()
            },
            **{
                kind: {part: Spread.of([each[part] for each in own[1:]]) for part in _PARTS}
                for kind, own in self.answers.items()
            },
        }


def run(options: LearnerBenchOptions) -> int:
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
    # what the other trainers compute
    same = {"autocast": multiplies_bfloat16(device), "loss": "grpo"}
    section = config.learner.model_copy(update=same)
    chosen = policies(model, directory, options.contestants)
    learners = {name: Learner(each, section) for name, each in chosen.items()}
    ours: dict[str, list[LearnerReport]] = {name: [] for name in learners}
    functions: dict[str, Callable[[], float | None]] = {
        name: partial(_own_step, each, packed, ours[name]) for name, each in learners.items()
    }
    functions["products"] = products.run
    turns = _peer_turns(options, config, batch)
    answers: dict[str, list[dict[str, float]]] = {kind: [] for kind in turns}
    with ExitStack() as stack:
        descriptions = {}
        for kind, (python, turn) in turns.items():
            log(f"loading {kind}")
            peer = stack.enter_context(
                open_trainer(python, kind, directory, options.threads, device)
            )
            descriptions[kind] = peer.description
            functions[kind] = partial(_peer_step, peer, turn, answers[kind])
        log("measuring")
        seconds = paired(functions, repeats=options.repeats)
    measured = Measured(
        seconds=seconds,
        reports=ours,
        answers=answers,
        descriptions=descriptions,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
    )
    result = _result(config, packed, products, measured)
    result["state_mb"] = {name: each.state_bytes() / 1e6 for name, each in learners.items()}
    state = result["state_mb"]
    sentences = [
        f"A step takes {result['over_products']['median']:.2f} times as long as its products "
        f"alone ({result['products_gflops']:,.0f} GFLOP/s).",
        "Weights, gradients and moments take "
        + ", ".join(f"{size:,.0f} MB ({name})" for name, size in state.items())
        + ".",
    ]
    table = _table(config, packed, measured)
    print_card([table], result, sentences=sentences, json_only=options.json)
    return 0


def policies(model: PolicyTransformer, directory: Path, names: Sequence[str]) -> dict[str, Policy]:
    """Return a model as longtail's learner trains it: by our decoder, and by transformers' code."""
    found: dict[str, Policy] = {"longtail": model}
    if "modelled" in names:
        found["modelled"] = CausalModel(read_pretrained(directory, torch.float32, model.device))
    if "adapters" in names:
        read = read_pretrained(directory, torch.float32, model.device)
        found["adapters"] = AdaptedModel(read, LoraSection(), seed=0)
    return found


def _own_step(learner: Learner, packed: TrainBatch, reports: list[LearnerReport]) -> None:
    reports.append(learner.step([packed]))


def _peer_turns(
    options: LearnerBenchOptions, config: RunConfig, batch: StepBatch
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return interpreter and job of each other trainer."""
    by_length = sorted(batch.kept, key=lambda i: len(batch.texts[i]))
    lengths = [len(batch.texts[i]) for i in by_length]
    padded = batch.turn(by_length, fill_rows(lengths, config.learner.tokens_per_micro_batch))
    turns = {}
    if "transformers" in options.contestants:
        turns["transformers"] = (options.peer_python or sys.executable, padded)
    if options.peer_python is not None:
        whole = range(len(batch.texts))
        micro_batches = [whole[i : i + _GROUP] for i in whole[::_GROUP]]
        turns["trl"] = (options.peer_python, batch.turn(whole, micro_batches))
    return turns


def fill_rows(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cut sequences into micro-batches while rows x longest stays within the budget."""
    cuts: list[list[int]] = []
    for index in range(len(lengths)):
        together = [*cuts[-1], index] if cuts else [index]
        if cuts and len(together) * max(lengths[i] for i in together) <= budget:
            cuts[-1] = together
        else:
            cuts.append([index])
    return cuts


def open_trainer(
    python: str, kind: str, directory: Path, threads: int, device: torch.device
) -> PeerProcess:
    """Start another trainer of a model, `transformers` or `trl`; it answers jobs of StepBatch."""
    where = {"device": device.type, "autocast": multiplies_bfloat16(device)}
    spec = {"kind": kind, "model_dir": str(directory), "threads": threads, **where}
    return PeerProcess(python, _WORKER, kind, spec, flag="--peer-python")


def _peer_step(
    peer: PeerProcess, turn: Mapping[str, Any], answers: list[dict[str, float]]
) -> float:
    answers.append(peer.ask(turn))
    return sum(answers[-1][part] for part in _PARTS)


def _tokens(packed: TrainBatch) -> tuple[int, int]:
    """Return the number of tokens, and of those that are scored."""
    tokens = sum(one.packed.num_tokens for one in packed.micro_batches)
    return tokens, sum(int(one.packed.loss_mask.sum()) for one in packed.micro_batches)


def _table(config: RunConfig, packed: TrainBatch, measured: Measured) -> Table:
    """Return a line for each contestant."""
    tokens, scored = _tokens(packed)
    parts, seconds = measured.parts, measured.seconds
    title = f"learner, {config.model.path}: {tokens} tokens, {scored} scored"
    return Table(
        f"{title}; micro-batches: {len(packed.micro_batches)}; {measured.device}",
        {
            "": lambda name: name,
            "step s": lambda name: Spread.of(seconds[name]),
            "forward s": lambda name: parts.get(name, {}).get("forward"),
            "backward s": lambda name: parts.get(name, {}).get("backward"),
            "update s": lambda name: parts.get(name, {}).get("update"),
            "over longtail": lambda name: ratios(seconds[name], seconds["longtail"]),
        },
        list(seconds),
    )


def _result(
    config: RunConfig, packed: TrainBatch, products: Products, measured: Measured
) -> dict[str, Any]:
    """Return the JSON."""
    tokens, scored = _tokens(packed)
    seconds = measured.seconds
    over = {name: ratios(own, seconds["longtail"]).numbers() for name, own in seconds.items()}
    norms = {kind: own[0]["grad_norm"] for kind, own in measured.answers.items()}
    return {
        "bench": "learner",
        "model": config.model.path,
        "device": measured.device,
        "budget": config.learner.tokens_per_micro_batch,
        "num_tokens": tokens,
        "num_scored": scored,
        "micro_batches": len(packed.micro_batches),
        "seconds": {name: Spread.of(own).numbers() for name, own in seconds.items()},
        "parts": {name: numbers(own) for name, own in measured.parts.items()},
        "over_products": ratios(seconds["longtail"], seconds["products"]).numbers(),
        "products_share": over["products"],
        "products_gflops": products.flops / Spread.of(seconds["products"]).median / 1e9,
        "transformers_ratio": over.get("transformers"),
        "trl_ratio": over.get("trl"),
        "modelled_ratio": over.get("modelled"),
        "adapters_ratio": over.get("adapters"),
        "grad_norm": {
            name: own[0].metrics["actor/grad_norm"] for name, own in measured.reports.items()
        }
        | norms,
        "peers": measured.descriptions,
    }
