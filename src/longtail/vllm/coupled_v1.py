"""Coupled drafts in vLLM's V1 model runner (0.23 to 0.33): keyed noise, drafts by equality.

    GPUModelRunner._sample                        which key and position belong to which row
      TopKTopPSampler(...)                        plain and bonus rows: drawn with keyed noise
      rejection_sample(...)                       draft rows: drawn likewise, drafts by equality
    SpecDecodeBaseProposer.set_inputs_first_pass  position of each request's first draft
      _sample_draft_tokens                        drafts drawn with the noise of the target

Penalties, truncation, processors and logprobs stay vLLM's; a step in which all requests are greedy
runs vLLM's own code. The noise is longtail's own: with its keys as seeds, vLLM writes the texts of
longtail's engine where both compute the same logits.
"""

import hashlib
import re
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.sampling import gumbel_noise
from longtail.vllm import cpu_fixes
from longtail.vllm.patching import Patch, check, module_of

REJECTED = -1
"""Token in place of rejected drafts, as vLLM expects it."""
GREEDY_BELOW = 1e-5
"""Temperature below which vLLM decodes greedily."""
_APPENDED = re.compile("-[0-9a-f]{8}$")


class StepNoise(NamedTuple):
    """Keys and positions of one step, in batch order."""

    keys: Int[Tensor, "requests"]
    last: Int[Tensor, "requests"]
    """Position of the token that each request's last row draws."""


_NOISE: ContextVar[StepNoise | None] = ContextVar("longtail_noise", default=None)


def patches() -> list[Patch]:
    """Return the replacements for this vLLM; ConfigError if a function is not a known one."""
    runner = module_of("vllm.v1.worker.gpu_model_runner", "GPUModelRunner")
    rejection = module_of("vllm.v1.sample.rejection_sampler")
    sampler = module_of("vllm.v1.sample.ops.topk_topp_sampler")
    row_sampler = module_of(sampler.__name__, "TopKTopPSampler")
    proposer = module_of("vllm.v1.spec_decode.llm_base_proposer", "SpecDecodeBaseProposer")
    check(row_sampler, "forward_native", "self logits generators k p")
    truncate = check(sampler, "apply_top_k_top_p", "logits k p", then="has_topp_only_rows")
    verified = (
        "draft_token_ids num_draft_tokens max_spec_len cu_num_draft_tokens draft_probs "
        "target_logits bonus_token_ids sampling_metadata"
    )
    features = (
        "synthetic_mode synthetic_conditional_rates use_fp64_gumbel "
        "fly_window_size fly_entropy_threshold fly_entropy_top_k"
    )
    drafts = "self hidden_states sampling_metadata"
    first = (
        "self target_token_ids next_token_ids target_positions target_hidden_states "
        "token_indices_to_sample cad num_rejected_tokens_gpu"
    )
    return [
        Patch.of(runner, "_sample", "self logits spec_decode_metadata", _sample),
        Patch.of(row_sampler, "__call__", "self args kwargs", partial(_draw_rows, truncate)),
        Patch.of(rejection, "rejection_sample", verified, _rejection_sample, features),
        Patch.of(proposer, "set_inputs_first_pass", first, _set_inputs_first_pass),
        Patch.of(proposer, "_sample_draft_tokens", drafts, _sample_draft_tokens),
        *cpu_fixes.patches(),
    ]


# ---- the runner


def _sample(stock: Callable[..., Any], self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
    """Sample a step with its noise at hand."""
    if self.input_batch.sampling_metadata.all_greedy:
        return stock(self, logits, spec_decode_metadata)
    noise = step_noise(self)
    # Nothing is drawn with them, and on a CPU vLLM 0.32 cannot rewind them after part of a prompt.
    self.input_batch.generators.clear()
    if getattr(self, "drafter", None) is not None:
        self.drafter.longtail_keys = noise.keys
    token = _NOISE.set(noise)
    try:
        return stock(self, logits, spec_decode_metadata)
    finally:
        _NOISE.reset(token)


def step_noise(runner: Any) -> StepNoise:
    """Return the noise of a step. The row at position p draws the token at p + 1."""
    keys = _request_keys(runner)
    ends = runner.query_start_loc.gpu[1 : len(keys) + 1].long() - 1
    return StepNoise(keys=keys, last=runner.positions[ends] + 1)


def _request_keys(runner: Any) -> Int[Tensor, "requests"]:
    """Return the key of each request in batch order; a preempted request keeps its key.

    Keys without a seed are of seed and rank, too, since every `LLM` numbers its requests from 0.
    """
    config, keys = runner.vllm_config, []
    engine = f"{config.model_config.seed}.{config.parallel_config.data_parallel_rank}"
    for name in runner.input_batch.req_ids:
        state = runner.requests[name]
        if not hasattr(state, "longtail_key"):
            given = getattr(state.sampling_params, "seed", None)
            state.longtail_key = request_key(engine, name) if given is None else given
        keys.append(state.longtail_key)
    return torch.tensor(keys, dtype=torch.int64).to(runner.device, non_blocking=True)


# ---- the samplers


def _draw_rows(
    truncate: Callable[..., Tensor],
    stock: Callable[..., Any],
    self: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """Draw plain rows and bonus rows, one per request, with the step's noise."""
    noise = _NOISE.get()
    if noise is None:
        return stock(self, *args, **options)
    logits, _, k, p = args
    logits = truncate(logits, k, p)
    kept = None
    if self.logprobs_mode == "processed_logits":
        kept = logits
    elif self.logprobs_mode == "processed_logprobs":
        kept = logits.log_softmax(-1, dtype=torch.float32)
    return draw(logits, noise.keys, noise.last), kept


def _rejection_sample(stock: Callable[..., Tensor], *args: Any, **features: Any) -> Tensor:
    """Draw the rows that hold drafts, and keep the drafts that equal their draws."""
    drafts, numbers, depth, _, _, logits, bonus, sampling = args  # as `check` has them
    if sampling.all_greedy:
        return stock(*args, **features)
    # Where a step has no noise vLLM measures its memory: any will do.
    keys, last = _NOISE.get() or drafts.new_zeros(2, len(numbers), dtype=torch.int64)
    counts, at = torch.tensor(numbers).to(keys.device), torch.arange(len(drafts)).to(keys.device)
    at += (last - counts.cumsum(0)).repeat_interleave(counts)
    drawn = draw(logits, keys.repeat_interleave(counts), at)
    if not sampling.all_random:
        is_greedy = (sampling.temperature < GREEDY_BELOW).repeat_interleave(counts)
        drawn = torch.where(is_greedy, logits.argmax(-1), drawn)
    if not len(drawn):
        return bonus.to(torch.int32)
    tokens, standing = match(drawn, drafts, counts.cumsum(0) - counts, counts, depth)
    column = torch.arange(depth + 1, device=drawn.device)
    tokens = torch.where(column < counts[:, None], tokens, bonus.to(tokens.dtype))
    return torch.where(column <= standing[:, None], tokens, REJECTED).to(torch.int32)


# ---- the drafter


def _set_inputs_first_pass(stock: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
    """Note the position of each request's first draft.

    EAGLE reads token p + 1 at position p and drafts token p + 2; a draft model reads token p.
    """
    tokens, rows, metadata = stock(self, *args, **options)
    at = self.mrope_positions[0] if self.uses_mrope else self.positions
    self.longtail_next = at[rows.long()] + (2 if self.pass_hidden_states_to_model else 1)
    return tokens, rows, metadata


def _sample_draft_tokens(
    stock: Callable[..., Any], self: Any, hidden_states: Any, sampling_metadata: Any
) -> Any:
    """Draw the next draft of each request; vLLM's own way where the noise is not known.

    Rows of some drafters are not one per request, and tokens of some are not the target's.
    """
    keys, positions = getattr(self, "longtail_keys", None), getattr(self, "longtail_next", None)
    if (
        keys is None
        or positions is None
        or len(keys) != len(positions)
        or sampling_metadata.all_greedy
        or self.parallel_drafting
        or getattr(self, "use_heterogeneous_vocab", False)
    ):
        return stock(self, hidden_states, sampling_metadata)
    logits = self.model.compute_logits(hidden_states)
    entries = torch.arange(logits.shape[-1], device=logits.device)
    offsets = getattr(self.model, "draft_id_to_target_id", None)
    if offsets is not None:  # only the drafted tokens need noise, under their target ids
        entries = torch.arange(len(offsets), device=logits.device) + offsets
        logits = logits[:, entries]
    temperature = sampling_metadata.temperature[: len(logits)]
    self.longtail_next = positions + 1
    return draw_drafts(logits, temperature, keys, positions, entries), None


def request_key(engine: str, name: str) -> int:
    """Return the noise key of a request without a seed: a hash of its id.

    `LLM` numbers its requests, so a program that runs again writes the same texts, drafted or not.
    What vLLM appends to an id is random and left out.
    """
    name = f"{engine} {_APPENDED.sub('', name)}"
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def draw(
    scaled_logits: Float[Tensor, "rows vocab"],
    keys: Int[Tensor, "rows"],
    positions: Int[Tensor, "rows"],
) -> Int[Tensor, "rows"]:
    """Draw one token per row; the logits are divided by the temperature and truncated already."""
    logprobs = scaled_logits.float().log_softmax(-1)
    return (logprobs + gumbel_noise(keys, positions, logprobs.shape[-1])).argmax(-1)


def draw_drafts(
    logits: Float[Tensor, "rows draft"],
    temperature: Float[Tensor, "rows"],
    keys: Int[Tensor, "rows"],
    positions: Int[Tensor, "rows"],
    entries: Int[Tensor, "draft"],
) -> Int[Tensor, "rows"]:
    """Draw drafts with the noise that the target will draw with, among the tokens `entries`."""
    logits, scale = logits.float(), temperature[:, None]
    noise = gumbel_noise(keys, positions, len(entries), entries)
    scores = logits / scale.clamp(min=GREEDY_BELOW) + noise
    return entries[torch.where(scale < GREEDY_BELOW, logits, scores).argmax(-1)]


def match(
    drawn: Int[Tensor, "rows"],
    drafts: Int[Tensor, "rows"],
    starts: Int[Tensor, "requests"],
    num_drafts: Int[Tensor, "requests"],
    depth: int,
) -> tuple[Int[Tensor, "requests columns"], Int[Tensor, "requests"]]:
    """Return the draws of each request in `depth` + 1 columns, and how many of its drafts stand.

    `drawn[i]` is the target's draw at row i, `drafts[i]` the draft for that place. A draft stands
    while all before it do and it equals the draw. Rows of a request begin at its `starts`; draws
    beyond them are undefined.
    """
    column = torch.arange(depth + 1, device=drawn.device)
    rows = (starts[:, None] + column).clamp(max=len(drawn) - 1)
    tokens, is_draft = drawn[rows], column < num_drafts[:, None]
    stands = is_draft & (tokens == drafts[rows])
    return tokens, stands.int().cumprod(1).sum(1)
