"""Processes that learn as one team, told over pipes what to do; they may die of it."""

import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from longtail.errors import LongtailError, TeamError
from longtail.model.transformer import Transformer
from longtail.rl.collectives import Team, TorchTeam
from longtail.rl.learner import Learner, LearnerSettings, LearnerState
from longtail.rl.learner_metrics import LearnerMetrics
from longtail.rl.optim import OptimizerSettings
from longtail.rl.packing import pack_mini_batches
from longtail.types import Completion, FinishReason, Prompt, Rollout, SamplingParams, TrainBatch
from support.tiny_models import tiny_model

PATIENCE_S = 60.0
"""How long a process may take over anything, before a test gives up."""
_CONTEXT = multiprocessing.get_context("spawn")

# eps = 1 makes an update smooth in the gradient, as in test_learner.py; here clipping takes part.
SETTINGS = LearnerSettings(
    loss="grpo",
    optimizer=OptimizerSettings(
        learning_rate=0.05,
        schedule="linear",
        total_steps=9,
        eps=1.0,
        weight_decay=0.1,
        max_grad_norm=0.5,
    ),
    kl_coef=0.1,
    tis_cap=1.02,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What batches a step is made of; small enough to tell every member.

    Example: Plan(seed=3, mini_batches=2)
    """

    seed: int
    lengths: tuple[tuple[int, int], ...] = ((3, 5), (2, 9), (4, 1), (1, 7), (2, 3), (5, 6), (1, 1))
    """Prompt and completion of each rollout."""
    budget: int = 12
    mini_batches: int = 1
    bad_advantage: int | None = None
    """The rollout whose advantage is not a number."""
    bad_logprob: int | None = None
    """The rollout whose first logprob is not a number."""
    idle: tuple[int, ...] = ()
    """Rollouts whose advantage is 0."""
    keep_idle: bool = True

    def batches(self) -> list[TrainBatch]:
        """Make the batches, the same everywhere."""
        generator = torch.Generator().manual_seed(self.seed)
        advantages = torch.randn(len(self.lengths), generator=generator, dtype=torch.float64)
        made = []
        for index, (prompt_len, completion_len) in enumerate(self.lengths):
            tokens = torch.randint(128, (prompt_len + completion_len,), generator=generator)
            # Close enough to a random model's logprobs for both sides of the clipping to be met.
            logprobs = torch.randn(completion_len, generator=generator, dtype=torch.float64) - 5.3
            if index == self.bad_logprob:
                logprobs[0] = float("nan")
            if index in self.idle:
                advantages[index] = 0.0
            if index == self.bad_advantage:
                advantages[index] = float("nan")
            made.append(_rollout(index, tokens.tolist(), prompt_len, logprobs.tolist()))
        return pack_mini_batches(
            made,
            advantages.tolist(),
            sampling=SamplingParams(max_tokens=16),
            budget=self.budget,
            mini_batches=self.mini_batches,
            keep_idle=self.keep_idle,
        )


def _rollout(
    index: int, tokens: Sequence[int], prompt_len: int, logprobs: Sequence[float]
) -> Rollout:
    return Rollout(
        prompt=Prompt(prompt_id=f"p{index}", tokens=tuple(tokens[:prompt_len]), text=""),
        completion=Completion(
            request_id=f"r{index}",
            tokens=tuple(tokens[prompt_len:]),
            logprobs=tuple(logprobs),
            text="",
            finish_reason=FinishReason.STOP,
            policy_version=0,
        ),
        reward=0.0,
    )


def new_learner(settings: LearnerSettings = SETTINGS, **model: Any) -> Learner:
    """A learner as every member begins: the same random weights, float64 unless said."""
    return Learner(tiny_model(**{"dtype": torch.float64, **model}), settings)


def arrays(tensors: Any) -> dict[str, np.ndarray]:
    """What goes through a pipe in place of tensors."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def free_address() -> str:
    """A place on this machine where nobody listens yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class Member:
    """A process of its own: `tell` it what to do, then `hear` what came of it."""

    def __init__(self) -> None:
        self._pipe, far = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(far,), daemon=True)
        self.process.start()
        far.close()

    def tell(self, what: str, *arguments: Any, **named: Any) -> None:
        self._pipe.send((what, arguments, named))

    def hear(self) -> Any:
        """The answer, or the error that it raised; EOFError if the process is gone."""
        assert self._pipe.poll(PATIENCE_S), "a member does not answer"
        return self._pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def ask(members: Sequence[Member], what: str, *arguments: Any, **named: Any) -> list[Any]:
    """Tell all members the same thing, then hear them all."""
    for member in members:
        member.tell(what, *arguments, **named)
    return [member.hear() for member in members]


def form(members: Sequence[Member], *, timeout_s: float = PATIENCE_S) -> None:
    """Make a team of the members, in this order."""
    address = free_address()
    for rank, member in enumerate(members):
        member.tell("form", rank, len(members), address, timeout_s)
    assert [member.hear() for member in members] == [None] * len(members)


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    served = _Served()
    deeds: dict[str, Callable[..., Any]] = {
        "form": served.form,
        "begin": served.begin,
        "step": served.step,
        "lose_sight": served.lose_sight,
        "look": served.look,
        "copy": served.copy,
        "restore": served.restore,
        "break_gradients": served.break_gradients,
        "break_backward": served.break_backward,
        "die_after": served.die_after,
        "die_after_passes": served.die_after_passes,
    }
    while True:
        try:
            what, arguments, named = pipe.recv()
        except EOFError:  # the test is over
            return
        try:
            answer = deeds[what](*arguments, **named)
        except LongtailError as error:
            answer = error
        pipe.send(answer)


class _Served:
    """A learner and its team, inside a member's process."""

    def __init__(self) -> None:
        self._team: TorchTeam | None = None
        self.begin(SETTINGS)

    def form(self, rank: int, size: int, address: str, timeout_s: float) -> None:
        if self._team is not None:
            self._team.close()
        self._team = TorchTeam(rank, size, address, backend="gloo", timeout_s=timeout_s)
        self._learner.join(self._team)

    def begin(self, settings: LearnerSettings, **model: Any) -> None:
        self._model = tiny_model(**{"dtype": torch.float64, **model})
        self._learner = Learner(self._model, settings)
        self._passes_left: int | None = None

    def step(self, plan: Plan) -> Any:
        return self._learner.step(plan.batches(), self._note)

    def _note(self, is_waiting: bool) -> None:
        if self._passes_left is not None:
            self._passes_left -= 1
            if self._passes_left < 0:
                os._exit(9)

    def lose_sight(self) -> None:
        """Have this member leave its team at the very end of its next step, when all have come."""
        pool = LearnerMetrics.pool

        def torn(tally: LearnerMetrics, team: Team) -> None:
            LearnerMetrics.pool = pool  # type: ignore[method-assign]
            pool(tally, team)
            assert self._team is not None
            self._team.close()
            raise TeamError("the sum never came")

        LearnerMetrics.pool = torn  # type: ignore[method-assign]

    def look(self) -> tuple[str, int]:
        """A digest of everything that this member's next step depends on, and the version."""
        state = self._learner.state()
        moments = {name: tensor.sum().item() for name, tensor in sorted(state.tensors.items())}
        return f"{self._learner.digest()} {moments}", self._learner.version

    def copy(self) -> Any:
        state = self._learner.state()
        weights = self._learner.weights().tensors
        return dict(state.numbers), arrays(state.tensors), arrays(weights)

    def restore(self, numbers: Any, tensors: Any, weights: Any) -> None:
        moments = {name: torch.from_numpy(array) for name, array in tensors.items()}
        self._learner.restore(
            LearnerState(tensors=moments, numbers=numbers),
            {name: torch.from_numpy(array) for name, array in weights.items()},
        )

    def break_gradients(self) -> None:
        """Make this member's next gradient of one matrix infinite, and no other."""
        weight = self._model.layers[0].attention.qkv.weight

        def broken(gradient: torch.Tensor) -> torch.Tensor:
            handle.remove()
            return gradient * float("inf")

        handle = weight.register_hook(broken)

    def break_backward(self) -> None:
        """Make all of this member's gradients of its next pass infinite."""
        logits = Transformer.logits

        def broken(model: Transformer, hidden: torch.Tensor) -> torch.Tensor:
            Transformer.logits = logits  # type: ignore[method-assign]
            scores = logits(model, hidden)
            scores.register_hook(lambda gradient: gradient * float("inf"))
            return scores

        Transformer.logits = broken  # type: ignore[method-assign]

    def die_after_passes(self, passes: int) -> None:
        """End the process after so many more passes, and one."""
        self._passes_left = passes

    def die_after(self, backwards: int) -> None:
        """End the process in the backward pass after so many more."""
        left = backwards

        def fall(gradient: torch.Tensor) -> None:
            nonlocal left
            if left == 0:
                os._exit(9)
            left -= 1

        self._model.norm.weight.register_hook(fall)
