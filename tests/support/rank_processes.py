"""Processes that each run one rank of a learner's process group; tests call them over pipes."""

import multiprocessing
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from longtail.config.rl import LearnerSection
from longtail.errors import LongtailError, ProcessGroupError
from longtail.model.transformer import Transformer
from longtail.rl.collectives import ProcessGroup, TorchProcessGroup
from longtail.rl.gradient_accumulators import GradientAccumulators
from longtail.rl.learner import Learner
from longtail.rl.packing import pack_mini_batches
from longtail.types import SamplingParams, TrainBatch
from support.rollouts import rollout
from support.tiny_models import tiny_model

PATIENCE_S = 60.0
"""Seconds after which a test gives up waiting for a process."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["longtail.rl.learner"])  # once, not in each process

# eps = 1 makes an update smooth in the gradient, as in test_learner.py; here clipping takes part.
SETTINGS = LearnerSection(
    loss="grpo",
    learning_rate=0.05,
    schedule="linear",
    eps=1.0,
    weight_decay=0.1,
    max_grad_norm=0.5,
    kl_coef=0.1,
    tis_cap=1.02,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Description of a step's batches, small enough to send to every process.

    Example: Plan(seed=3, mini_batches=2)
    """

    seed: int
    lengths: tuple[tuple[int, int], ...] = ((3, 5), (2, 9), (4, 1), (1, 7), (2, 3), (5, 6), (1, 1))
    """Prompt and completion length of each rollout."""
    budget: int = 12
    mini_batches: int = 1
    bad_advantage: int | None = None
    """Index of a rollout whose advantage is not a number."""
    idle: tuple[int, ...] = ()
    """Indices of rollouts with advantage 0."""
    keep_idle: bool = True
    names: str = ""
    """Visit of the rollouts, with which names of micro-batches begin."""

    def batches(self) -> list[TrainBatch]:
        """Return the batches, equal in every process."""
        generator = torch.Generator().manual_seed(self.seed)
        advantages = torch.randn(len(self.lengths), generator=generator, dtype=torch.float64)
        made = []
        for index, (prompt_len, completion_len) in enumerate(self.lengths):
            tokens = torch.randint(128, (prompt_len + completion_len,), generator=generator)
            # Close enough to a random model's logprobs for both sides of the clipping to be met.
            logprobs = torch.randn(completion_len, generator=generator, dtype=torch.float64) - 5.3
            if index in self.idle:
                advantages[index] = 0.0
            if index == self.bad_advantage:
                advantages[index] = float("nan")
            made.append(
                rollout(
                    tokens.tolist(),
                    prompt_len,
                    logprobs=tuple(logprobs.tolist()),
                    request_id=f"{self.names}#{index}",
                )
            )
        return pack_mini_batches(
            made,
            advantages.tolist(),
            sampling=SamplingParams(max_tokens=16),
            budget=self.budget,
            mini_batches=self.mini_batches,
            keep_idle=self.keep_idle,
        )


def new_learner(settings: LearnerSection = SETTINGS, **model: Any) -> Learner:
    """Return a learner with the initial weights of every rank, in float64 by default."""
    return Learner(tiny_model(**{"dtype": torch.float64, **model}), settings, total_steps=9)


def arrays(tensors: Any) -> dict[str, np.ndarray]:
    """Return arrays, which go through a pipe, in place of tensors."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def free_address() -> str:
    """Return an address of this machine at which no socket listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class RankProcess:
    """A process with a learner: `send` a call, then `receive` its result."""

    def __init__(self) -> None:
        self._pipe, far = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(far,), daemon=True)
        self.process.start()
        far.close()

    def send(self, name: str, *arguments: Any, **named: Any) -> None:
        self._pipe.send((name, arguments, named))

    def receive(self) -> Any:
        """Return the result, or the error that was raised; EOFError if the process is gone."""
        assert self._pipe.poll(PATIENCE_S), "a process does not answer"
        return self._pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def call_all(ranks: Sequence[RankProcess], name: str, *arguments: Any, **named: Any) -> list[Any]:
    """Send all processes the same call, then return all results."""
    for each in ranks:
        each.send(name, *arguments, **named)
    return [each.receive() for each in ranks]


def connect(ranks: Sequence[RankProcess], *, timeout_s: float = PATIENCE_S) -> None:
    """Form a process group of the processes, in this order."""
    address = free_address()
    for rank, each in enumerate(ranks):
        each.send("connect", rank, len(ranks), address, timeout_s)
    assert [each.receive() for each in ranks] == [None] * len(ranks)


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    served = _Rank()
    while True:
        try:
            name, arguments, named = pipe.recv()
        except EOFError:  # the test is over
            return
        try:
            answer = getattr(served, name)(*arguments, **named)
        except LongtailError as error:
            answer = error
        pipe.send(answer)


class _Rank:
    """The learner and its process group, inside a process."""

    def __init__(self) -> None:
        self._group: TorchProcessGroup | None = None
        self.begin(SETTINGS)

    def connect(self, rank: int, size: int, address: str, timeout_s: float) -> None:
        if self._group is not None:
            self._group.close()
        self._group = TorchProcessGroup(rank, size, address, backend="gloo", timeout_s=timeout_s)
        self._learner.join(self._group)

    def begin(self, settings: LearnerSection, **model: Any) -> None:
        self._model = tiny_model(**{"dtype": torch.float64, **model})
        self._learner = Learner(self._model, settings, total_steps=9)
        self._passes_left: int | None = None
        self._passes = 0

    def step(self, plan: Plan) -> Any:
        return self._learner.step(plan.batches(), self._count_pass)

    def accumulate(self, plan: Plan, number: int) -> None:
        (batch,) = plan.batches()
        self._learner.accumulate(batch.micro_batches[number], batch.sampling)

    def num_passes(self) -> int:
        """Return the number of micro-batches that steps computed."""
        return self._passes

    def _count_pass(self, is_waiting: bool) -> None:
        self._passes += not is_waiting
        if self._passes_left is not None:
            self._passes_left -= 1
            if self._passes_left < 0:
                os._exit(9)

    def lose_group(self, update: int) -> None:
        """Close this rank's group between reduction and update number `update` of its next step."""
        reduce = GradientAccumulators.reduce

        def interrupted(sums: GradientAccumulators, group: ProcessGroup) -> None:
            nonlocal update
            reduce(sums, group)
            update -= 1
            if update >= 0:
                return
            GradientAccumulators.reduce = reduce  # type: ignore[method-assign]
            assert self._group is not None
            self._group.close()
            raise ProcessGroupError("the sum is lost")

        GradientAccumulators.reduce = interrupted  # type: ignore[method-assign]

    def digest(self) -> tuple[str, int]:
        """Return a digest of all state of the next step, and the version."""
        state = self._learner.state()
        moments = {name: tensor.sum().item() for name, tensor in sorted(state.tensors.items())}
        return f"{self._learner.digest()} {moments}", self._learner.version

    def copy(self) -> Any:
        state = self._learner.state()
        weights = self._learner.learned()
        return dict(state.numbers), arrays(state.tensors), arrays(weights)

    def break_backward(self) -> None:
        """Make all gradients of this rank's next pass infinite."""
        logits = Transformer.logits

        def broken(model: Transformer, hidden: torch.Tensor) -> torch.Tensor:
            Transformer.logits = logits  # type: ignore[method-assign]
            scores = logits(model, hidden)
            scores.register_hook(lambda gradient: gradient * float("inf"))
            return scores

        Transformer.logits = broken  # type: ignore[method-assign]

    def die_after_passes(self, passes: int) -> None:
        """End the process after `passes` more passes and one."""
        self._passes_left = passes
