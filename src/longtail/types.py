"""The records that flow through a run, in the order they are made.

    Prompt -> Request -> Completion -> Rollout -> Group -> TrainBatch -> PolicyWeights

A record never gains a field: the next stage makes the next record. Nothing here computes, and
only `TrainBatch` and `PolicyWeights` hold tensors. What a stage does belongs to its own module.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from longtail.errors import RequestError
from longtail.system.strict_json import find_surrogate

MIN_TEMPERATURE = 1e-3
"""Above 0: logits are divided by it, and less would leave the range of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem, tokenized once.

    Example: Prompt(prompt_id="train/17", tokens=(3, 9, 4), text="6*7=", data={"answer": "42"})
    """

    prompt_id: str
    """Stable across epochs, restarts and workers: it keys the sampling noise."""
    tokens: tuple[int, ...]
    text: str
    """What the model reads, chat template applied."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the source row; the reward reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. The defaults sample the model's own distribution.

    Truncations apply after temperature, in the order top_k, top_p, min_p, each to what the ones
    before it left (renormalised). temperature 0 is greedy.

    Example: SamplingParams(temperature=1.0, top_p=0.95, max_tokens=512, stop=("</answer>",))
    """

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    """Strings that end a completion; `text` is cut before the match, `tokens` keep it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion (EOS among them); kept as its last token."""

    def __post_init__(self) -> None:
        """Refuse values outside their domain, before any work starts."""
        checks = (
            (
                "temperature",
                self.temperature,
                self.temperature == 0.0 or MIN_TEMPERATURE <= self.temperature < float("inf"),
                f"0 (greedy) or finite and >= {MIN_TEMPERATURE}",
            ),
            ("top_k", self.top_k, self.top_k >= 0, ">= 0 (0 keeps every token)"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", self.min_p, 0.0 <= self.min_p < 1.0, "in [0, 1)"),
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, ">= 1"),
            ("stop", self.stop, all(self.stop), "without empty strings"),
            (
                "stop",
                self.stop,
                all(find_surrogate(stop) is None for stop in self.stop),
                "whole characters, no half of a surrogate pair",
            ),
        )
        for name, value, good, domain in checks:
            if not good:
                raise RequestError(f"sampling.{name} = {value!a}: it must be {domain}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion asked of a rollout engine.

    `(weights, prompt_tokens, sampling, noise_key)` determine the completion; nothing else does.

    Example: Request(request_id="train/17#3", prompt_tokens=(3, 9, 4), noise_key=0x5eed)
    """

    request_id: str
    """Unique among the requests an engine holds at one time."""
    prompt_tokens: tuple[int, ...]
    noise_key: int
    """64 bits, see `sampling.noise_key`."""
    sampling: SamplingParams = SamplingParams()
    group_id: str = ""
    """Requests with the same non-empty group share one prompt, hence its KV."""


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop token or a stop string was produced."""
    LENGTH = "length"
    """max_tokens was reached."""
    ABORT = "abort"
    """The caller withdrew the request; what was produced is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine wrote for one request.

    Example: Completion(request_id="train/17#3", tokens=(5, 1), logprobs=(-0.1, -0.02), text="42",
                        finish_reason=FinishReason.STOP, policy_version=12)
    """

    request_id: str
    tokens: tuple[int, ...]
    """Generated tokens only, the stop token included."""
    logprobs: tuple[float, ...]
    """Natural log, one a token, under the distribution actually sampled."""
    text: str
    """Decoded without special tokens; cut before a stop string."""
    finish_reason: FinishReason
    policy_version: int
    """Version of the weights that wrote the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A graded completion.

    Example: Rollout(prompt=p, completion=c, reward=1.0, components={"correct": 1.0})
    """

    prompt: Prompt
    completion: Completion
    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    """The named terms that `reward` is made of; logged, not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingFailure:
    """A completion without a reward: its grader raised, hung, or returned nonsense.

    Excluded from the update and counted; never a reward of 0.
    """

    prompt: Prompt
    completion: Completion
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one prompt under one policy."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequences:
    """Whole sequences laid end to end, without padding; one micro-batch of the learner.

    Sequence s owns the tokens [cu_seqlens[s], cu_seqlens[s+1]); positions restart at 0 in each, and
    attention never crosses a boundary.

    Example: the prompt (7, 8) answered by (9, 2), then the prompt (7,) answered by (2,):
        tokens        7   8   9   2 | 7   2        cu_seqlens  0, 4, 6
        positions     0   1   2   3 | 0   1
        sequence      0   0   0   0 | 1   1
        loss_mask     0   0   1   1 | 0   1        1 where the token was generated
    Values at token i speak of token i itself (its logprob, its advantage), predicted from i - 1.
    """

    tokens: Int[Tensor, "tokens"]
    positions: Int[Tensor, "tokens"]
    sequence: Int[Tensor, "tokens"]
    cu_seqlens: tuple[int, ...]
    loss_mask: Float[Tensor, "tokens"]

    @property
    def num_tokens(self) -> int:
        """Tokens in this micro-batch, prompts included."""
        return self.cu_seqlens[-1]

    @property
    def num_sequences(self) -> int:
        """Sequences in this micro-batch."""
        return len(self.cu_seqlens) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Packed sequences with what policy-gradient losses read; values are 0 where loss_mask is 0."""

    packed: PackedSequences
    rollout_logprobs: Float[Tensor, "tokens"]
    """What the rollout engine reported for each generated token."""
    advantages: Float[Tensor, "tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Everything one learner step consumes: micro-batches whose gradients are summed.

    The normalisers are counted over the whole batch, so how it is cut into micro-batches cannot
    change the gradient.
    """

    micro_batches: tuple[MicroBatch, ...]
    sampling: SamplingParams
    """The distribution that was sampled: the learner's logprobs are taken under the same one."""
    num_sequences: int
    num_generated: int
    """Tokens with loss_mask 1, over all micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWeights:
    """A published policy: parameter name (as in `model.Transformer`) -> tensor, and its version.

    Tensors are never modified after publication.
    """

    version: int
    tensors: Mapping[str, Tensor]
