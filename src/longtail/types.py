"""The records that flow through a run, in the order they are made.

    Prompt -> Request -> Completion -> Rollout -> Group -> TrainBatch

A record is complete when it is made; the next stage makes the next record. Only micro-batches and
`TrainBatch` hold tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.config.sections import MIN_TEMPERATURE
from longtail.errors import RequestError
from longtail.system.files import find_surrogate


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem, tokenized once.

    Example: Prompt(prompt_id="train/17", tokens=(3, 9, 4), text="6*7=", data={"answer": "42"})
    """

    prompt_id: str
    """Id that is stable across epochs, restarts and workers; it keys the sampling noise."""
    tokens: tuple[int, ...]
    text: str
    """Text that the model reads, with the chat template applied."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the source row, for the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of the sampled distribution. The defaults sample the model's own distribution.

    Truncations apply after the temperature, in the order top_k, top_p, min_p. Each applies to the
    tokens that the previous ones kept, renormalised. temperature 0 is greedy.

    Example: SamplingParams(temperature=1.0, top_p=0.95, max_tokens=512, stop=("</answer>",))
    """

    temperature: float = 1.0
    top_k: int = 0
    """Number of most probable tokens to keep; 0 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    """Strings that end a completion. `text` is cut before the match; `tokens` include it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, EOS among them; the last token of the completion."""

    def __post_init__(self) -> None:
        """Raise RequestError for values outside their domain."""
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
    """A request for one completion.

    The completion is a function of `(weights, prompt_tokens, sampling, noise_key)` alone.

    Example: Request(request_id="train/17#3", prompt_tokens=(3, 9, 4), noise_key=0x5eed)
    """

    request_id: str
    """Id that is unique among the requests an engine holds at one time."""
    prompt_tokens: tuple[int, ...]
    noise_key: int
    """Key of the sampling noise, 64 bits; see `sampling.noise_key`."""
    sampling: SamplingParams = SamplingParams()
    group_id: str = ""
    """Requests with the same non-empty group id have one prompt and share its KV."""
    row: Mapping[str, Any] | None = None
    """Row of the source, for the environment of an episode; None without one."""
    may_go_on: bool = False
    """Whether another request may continue its text, as an episode's next turn: its KV stays until
    others need the memory."""
    continues: str = ""
    """Id of the request whose text, now part of the prompt, this one continues."""

    def check(self, vocab_size: int, max_len: int) -> None:
        """Raise RequestError unless a generator of `max_len` positions can serve the request."""
        longest = len(self.prompt_tokens) + self.sampling.max_tokens
        if not self.prompt_tokens:
            raise RequestError(f"request {self.request_id!r} has an empty prompt")
        for verb, tokens in (
            ("holds", self.prompt_tokens),
            ("stops at", self.sampling.stop_token_ids),
        ):
            outside = [token for token in tokens if not 0 <= token < vocab_size]
            if outside:
                raise RequestError(
                    f"request {self.request_id!r} {verb} token {outside[0]}, but the model's "
                    f"vocabulary has {vocab_size}; use the model's own tokenizer"
                )
        if not -(2**63) <= self.noise_key < 2**63:
            raise RequestError(
                f"request {self.request_id!r} has noise_key {self.noise_key}, beyond a signed "
                "64-bit integer; make it with sampling.noise_key"
            )
        if longest > max_len:
            raise RequestError(
                f"request {self.request_id!r} may reach {longest} tokens (prompt "
                f"{len(self.prompt_tokens)} + max_tokens {self.sampling.max_tokens}), over "
                f"the engine's {max_len}; shorten it or raise the limit"
            )


class FinishReason(StrEnum):
    """Reason why a completion ended."""

    STOP = "stop"
    """A stop token or a stop string was generated."""
    LENGTH = "length"
    """max_tokens was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The environment's part of a completion of several turns.

    Example: prompt p0 p1, turns "a b" and "c", an observation of two tokens between them:
    Completion.tokens are a b o0 o1 c, and `observed` is ((2, 4),)
    """

    prompt_tokens: tuple[int, ...]
    """Prompt of the first turn, with what the environment gave at its start."""
    prompt: str = ""
    """Its text."""
    observed: tuple[tuple[int, int], ...] = ()
    """Begin and end of each observation in `Completion.tokens`; their logprobs are 0."""
    messages: tuple[Mapping[str, str], ...] = ()
    """Turns and observations as chat messages, without the prompt."""
    rewards: tuple[float, ...] = ()
    """Reward of each turn."""
    num_calls: int = 0
    """Number of tool calls."""
    num_bad_calls: int = 0
    """Number of those that named no tool, or whose arguments were refused."""
    waited_s: float = 0.0
    """Seconds in which the environment answered."""
    problem: str = ""
    """Why the episode has no reward; empty if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The generated text of one request.

    Example: Completion(request_id="train/17#3", tokens=(5, 1), logprobs=(-0.1, -0.02), text="42",
                        finish_reason=FinishReason.STOP, policy_version=12)
    """

    request_id: str
    tokens: tuple[int, ...]
    """Generated tokens, the stop token included."""
    logprobs: tuple[float, ...]
    """Natural log-probability of each token under the sampled distribution."""
    text: str
    """Decoded tokens without special tokens, cut before a stop string."""
    finish_reason: FinishReason
    policy_version: int
    """Version of the weights that generated the first token."""
    episode: Episode | None = None
    """The environment's part; None for a text of one turn."""

    @property
    def num_generated(self) -> int:
        """Number of tokens that the model wrote."""
        observed = () if self.episode is None else self.episode.observed
        return len(self.tokens) - sum(end - begin for begin, end in observed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A graded completion.

    Example: Rollout(prompt=p, completion=c, reward=1.0)
    """

    prompt: Prompt
    completion: Completion
    reward: float

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Tokens before the completion."""
        episode = self.completion.episode
        return self.prompt.tokens if episode is None else episode.prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingFailure:
    """A completion without a reward: its grader raised, hung, or returned an invalid value.

    It is counted and excluded from the update; it never becomes a reward of 0.
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
    """Whole sequences concatenated without padding; one micro-batch of the learner.

    Sequence s has the tokens [cu_seqlens[s], cu_seqlens[s+1]). Positions restart at 0 in each
    sequence, and attention never crosses a boundary.

    Example: the prompt (7, 8) answered by (9, 2), then the prompt (7,) answered by (2,):
        tokens        7   8   9   2 | 7   2        cu_seqlens  0, 4, 6
        positions     0   1   2   3 | 0   1
        sequence      0   0   0   0 | 1   1
        loss_mask     0   0   1   1 | 0   1        1 where the token was generated
    Values at index i (logprob, advantage) are those of token i itself, predicted from i - 1.

    Neighbours of the same prompt may share its tokens (`rl.packing.share_prompts`). `places` then
    lists the tokens of the whole sequences, which `cu_seqlens` counts: the prompt (7, 8) answered
    by (9, 2) and by (4,) has tokens 7 8 9 2 4, places 0 1 2 3 0 1 4, and cu_seqlens 0, 4, 7.
    """

    tokens: Int[Tensor, "tokens"]
    positions: Int[Tensor, "tokens"]
    sequence: Int[Tensor, "tokens"]
    cu_seqlens: tuple[int, ...]
    loss_mask: Float[Tensor, "tokens"]
    places: Int[Tensor, "laid"] | None = None
    """Index in `tokens` of each token of the whole sequences; None if they share none."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, prompts included."""
        return len(self.tokens)

    @property
    def previous(self) -> Int[Tensor, "tokens"]:
        """Index of the token before each token, in its sequence; undefined for a first token."""
        if self.places is None:
            return torch.arange(-1, len(self.tokens) - 1, device=self.tokens.device)
        found = torch.zeros_like(self.tokens)
        found[self.places[1:]] = self.places[:-1]
        return found

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return len(self.cu_seqlens) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Packed sequences with the inputs of the loss; values are 0 where loss_mask is 0."""

    name: str
    """Group and number, as "p/17@2/0": no other micro-batch of a step has it."""
    packed: PackedSequences
    rollout_logprobs: Float[Tensor, "tokens"]
    """Logprob of each generated token, as the rollout engine reported it."""
    advantages: Float[Tensor, "tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The input of one learner step: micro-batches whose gradients are summed.

    Counts are of the whole batch; the loss is divided by one of them (`rl.loss`).
    """

    micro_batches: tuple[MicroBatch, ...]
    sampling: SamplingParams
    """Parameters of the sampled distribution; the learner's logprobs use the same one."""
    num_sequences: int
    num_generated: int
    """Number of tokens with loss_mask 1, over all micro-batches."""
