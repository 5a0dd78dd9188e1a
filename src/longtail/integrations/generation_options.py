"""Options of transformers' `generate`, translated for the engine or refused by their names.

An option that changes the text arrives as a logits processor, as a stopping criterion or as another
generation mode, so an option that a later transformers adds is refused, too.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from longtail.errors import ConfigError
from longtail.types import SamplingParams

_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_WARPERS = (
    (TemperatureLogitsWarper, "temperature"),
    (TopKLogitsWarper, "top_k"),
    (TopPLogitsWarper, "top_p"),
    (MinPLogitsWarper, "min_p"),
)
"""Supported processors, in the order in which transformers and the engine apply them."""
_FIELDS = {
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "MinLengthLogitsProcessor": "min_length or min_new_tokens",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "TopHLogitsWarper": "top_h",
    "TypicalLogitsWarper": "typical_p",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
}
"""Option that makes transformers add each processor; others are of the caller."""
_WITHOUT_EFFECT = frozenset(
    {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
)


def refuse_unsupported(config: GenerationConfig, model_kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError for outputs, modes and model inputs that the engine does not have."""
    for name in _OUTPUTS:
        if getattr(config, name, None):
            raise ConfigError(
                f"{name} = True: longtail keeps logprobs of the sampled tokens only; leave it out "
                "and read `logprobs` with return_dict_in_generate=True"
            )
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ConfigError(
            f"generation mode {mode.value!r}: longtail samples, or takes the likeliest token; "
            "leave out the option that selects it (num_beams, prompt_lookup_num_tokens, ...)"
        )
    past = model_kwargs.get("past_key_values")
    if past is not None and past.get_seq_length():
        raise ConfigError(
            "past_key_values holds keys and values of earlier tokens: give the whole text as "
            "input_ids; the engine keeps its own cache"
        )
    for name, value in model_kwargs.items():
        if name not in _WITHOUT_EFFECT and value is not None:
            raise ConfigError(f"{name}: not supported; longtail takes input_ids and attention_mask")


def sampling_of(
    config: GenerationConfig,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    input_ids: Tensor,
) -> SamplingParams:
    """Return the engine's parameters; raise ConfigError for any other processor."""
    params: dict[str, Any] = {}
    place = 0
    for processor in processors:
        kinds = [index for index, (kind, _) in enumerate(_WARPERS) if type(processor) is kind]
        if isinstance(processor, LogitNormalization):
            continue  # the engine's distribution is normalised
        if not kinds or kinds[0] < place or vars(processor).get("min_tokens_to_keep", 1) != 1:
            raise _refused_processor(processor)
        place, name = kinds[0] + 1, _WARPERS[kinds[0]][1]
        params[name] = getattr(processor, name)
    if not config.do_sample:
        params = {"temperature": 0.0}
    lengths = [each.max_length for each in criteria if isinstance(each, MaxLengthCriteria)]
    stops = [each.eos_token_id for each in criteria if isinstance(each, EosTokenCriteria)]
    return SamplingParams(
        **params,
        max_tokens=min(lengths) - input_ids.shape[1],
        stop_token_ids=tuple(int(token) for ids in stops for token in ids.flatten()),
    )


def _refused_processor(processor: object) -> ConfigError:
    kind = type(processor).__name__
    field = _FIELDS.get(kind)
    return ConfigError(
        f"{field or 'logits_processor'} ({kind}): not supported, it would change the distribution; "
        "longtail samples with temperature, top_k, top_p and min_p, in this order"
    )


def extra_criteria(criteria: StoppingCriteriaList) -> StoppingCriteriaList:
    """Return the criteria that are evaluated after each token; refuse those that read a clock."""
    extra = StoppingCriteriaList()
    for each in criteria:
        if isinstance(each, MaxTimeCriteria):
            raise ConfigError("max_time: not supported, the text would depend on the machine")
        if type(each).__name__ == "ConfidenceCriteria":
            raise ConfigError("assistant_confidence_threshold: not supported; leave it out")
        if not isinstance(each, MaxLengthCriteria | EosTokenCriteria):
            extra.append(each)
    return extra


def prompts_of(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return each row's tokens without its left padding."""
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(input_ids)
    if mask.shape != input_ids.shape:
        raise ConfigError(
            f"attention_mask has shape {list(mask.shape)} and input_ids {list(input_ids.shape)}: "
            "they must be equal"
        )
    kept = (mask != 0).cpu()
    if not bool((kept[:, :-1] <= kept[:, 1:]).all()) or not bool(kept[:, -1:].all()):
        raise ConfigError(
            "attention_mask is 0 after a 1, or in a whole row: pad on the left "
            "(tokenizer.padding_side = 'left') and leave no prompt empty"
        )
    prompts = [tuple(row[keep].tolist()) for row, keep in zip(input_ids.cpu(), kept, strict=True)]
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        expected = (kept.cumsum(-1) - 1)[kept]
        if not torch.equal(positions.cpu().expand_as(kept)[kept], expected):
            raise ConfigError(
                "position_ids: not supported; positions count the tokens of attention_mask"
            )
    return prompts
