"""Generation of transformers models with longtail's engine.

    from longtail.integrations.transformers import generate

    model.generate(**inputs, custom_generate=generate, drafter="auto", seed=3)

transformers prepares inputs, processors and criteria as for its own decoding and then calls
`generate`. A processor or criterion that the engine cannot apply is refused by its name before any
work. The engine has weights of its own, and is kept as long as the model lives.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from longtail.assembly.device import own_engine_device
from longtail.assembly.drafters import (
    NONE,
    WEIGHTLESS,
    Target,
    check_names,
    drafter_names,
    open_drafters,
)
from longtail.assembly.engine import completion_key, model_directory
from longtail.engine.engine import RolloutEngine
from longtail.engine.report import RolloutMeter
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import ConfigError, RequestError
from longtail.integrations.generation_options import (
    extra_criteria,
    prompts_of,
    refuse_unsupported,
    sampling_of,
)
from longtail.integrations.mirror import MirroredPolicy
from longtail.model.hf.config import Fields, parse
from longtail.model.hf.model import empty_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.speculation.drafter import Drafter
from longtail.tuner.budget import BudgetTuner
from longtail.types import Request, SamplingParams

_MAX_RUNNING = 64
_SEED_BITS = 53


@dataclass
class LongtailOutput(GenerateDecoderOnlyOutput):
    """Sequences as transformers returns them, with logprobs and speculation counts."""

    logprobs: Tensor | None = None
    """Logprob of each generated token under the sampled distribution; 0 after the end."""
    num_drafted: int | None = None
    num_accepted: int | None = None
    accept_length: float | None = None
    """Tokens per verified draft, the bonus token included; None if nothing was drafted."""


@torch.no_grad()
def generate(  # noqa: PLR0913 - transformers chooses the parameters
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: str = "auto",
    seed: int | None = None,
    **model_kwargs: Any,
) -> LongtailOutput | Tensor:
    """Generate as `model.generate` does, for its argument `custom_generate`.

    `drafter` is a name as for `longtail generate --drafter`; it changes the speed, no text. A
    sample depends on the weights, its prompt, the sampling parameters, `seed` and its index among
    the rows with its prompt. Without `seed` one is drawn from torch's generator.
    """
    refuse_unsupported(generation_config, model_kwargs)
    check_names(drafter, field="drafter")
    sampling = sampling_of(generation_config, logits_processor, stopping_criteria, input_ids)
    prompts = prompts_of(input_ids, model_kwargs)
    if seed is None:
        seed = int(torch.randint(2**_SEED_BITS, ()))
    requests = _requests(prompts, sampling, seed)
    writer = _Writer(input_ids, requests, extra_criteria(stopping_criteria), generation_config)
    mirror = _mirror(model)
    with mirror.lock:
        writer.run(mirror.engine(model, requests, drafter))
    return writer.output(as_record=bool(generation_config.return_dict_in_generate))


def _requests(
    prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, seed: int
) -> list[Request]:
    """Return one request per row; rows with the same prompt share its KV and differ in noise."""
    rows: dict[tuple[int, ...], list[int]] = {}
    requests = []
    for row, prompt in enumerate(prompts):
        same = rows.setdefault(prompt, [])
        same.append(row)
        requests.append(
            Request(
                request_id=str(row),
                prompt_tokens=prompt,
                noise_key=completion_key(seed, len(same) - 1),
                sampling=sampling,
                group_id=f"prompt of row {same[0]}",
            )
        )
    return requests


@final
class _Writer:
    """The padded batch of one call, filled while the engine generates."""

    def __init__(
        self,
        input_ids: Tensor,
        requests: Sequence[Request],
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ) -> None:
        rows, self._width = input_ids.shape
        longest = requests[0].sampling.max_tokens
        padding = vars(config).get("_pad_token_tensor")
        if padding is None and criteria and rows > 1:
            raise ConfigError(
                "generation_config.pad_token_id = None: rows that end early need a padding token; "
                "set pad_token_id"
            )
        self._requests, self._criteria, self._device = requests, criteria, input_ids.device
        self._sequences = torch.full(
            (rows, self._width + longest), 0 if padding is None else int(padding)
        )
        self._sequences[:, : self._width] = input_ids
        self._logprobs = torch.zeros(rows, longest)
        self._lengths = [0] * rows
        self._meter = RolloutMeter()

    def run(self, engine: RolloutEngine) -> None:
        """Generate all rows; the engine is idle before and after."""
        try:
            for request in self._requests:
                engine.submit(request)
            while engine.num_unfinished:
                self._step(engine)
        finally:
            for request in self._requests:
                if engine.is_unfinished(request.request_id):
                    engine.abort(request.request_id)

    def _step(self, engine: RolloutEngine) -> None:
        report = engine.step()
        for failed in report.failed:
            raise failed.error
        ended: set[str] = set()
        for each in report.emitted:
            if each.request_id not in ended and self._append(
                int(each.request_id), each.token, each.logprob
            ):
                ended.add(each.request_id)
        for request_id in ended:
            if engine.is_unfinished(request_id):
                engine.abort(request_id)
        self._meter.add(report)

    def _append(self, row: int, token: int, logprob: float) -> bool:
        """Append a token to a row; return whether a criterion ends the row there."""
        place = self._lengths[row]
        self._lengths[row] += 1
        self._logprobs[row, place] = logprob
        end = self._width + place + 1
        self._sequences[row, end - 1] = token
        text = self._sequences[row : row + 1, :end]
        return any(bool(criterion(text, None)) for criterion in self._criteria)

    def output(self, *, as_record: bool) -> LongtailOutput | Tensor:
        """Return the batch up to the end of its longest row."""
        longest = max(self._lengths)
        sequences = self._sequences[:, : self._width + longest].to(self._device)
        if not as_record:
            return sequences
        report = self._meter.report()
        return LongtailOutput(
            sequences=cast(torch.LongTensor, sequences),
            logprobs=self._logprobs[:, :longest].to(self._device),
            num_drafted=report.num_drafted,
            num_accepted=report.num_accepted,
            accept_length=report.accept_length or None,
        )


@final
class _Mirror:
    """The engine of a transformers model, and its drafters."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = parse(Fields(model.config.to_dict(), f"the config of {type(model).__name__}"))
        first = next(model.parameters())
        device = own_engine_device(first.device.type, "model.device")
        self.lock = threading.Lock()
        """Held while the engine is used."""
        self._source = str(model.config.name_or_path)
        self._policy = MirroredPolicy(
            empty_model(config, first.dtype, device),
            lambda tokens: "",  # transformers decodes them itself
            max_running=_MAX_RUNNING,
            max_len=config.max_positions,
        )
        self._drafter = NONE

    def engine(
        self, model: PreTrainedModel, requests: Sequence[Request], drafter: str
    ) -> RolloutEngine:
        """Return an idle engine with the model's present weights and these drafters.

        Raises RequestError if a text would not fit into the model's positions.
        """
        longest = max(len(each.prompt_tokens) for each in requests)
        positions, new = self._policy.max_len, requests[0].sampling.max_tokens
        if longest + new > positions:
            raise RequestError(
                f"max_new_tokens = {new}: after a prompt of {longest} tokens the model has "
                f"{max(positions - longest, 0)} of its {positions} positions left"
            )
        weights = _weights(model)
        if not self._policy.holds(weights):
            self._policy.pull(weights.items())
        if drafter != self._drafter:
            self._policy.speculate(self._speculation(drafter))
            self._drafter = drafter
        return self._policy.ready(requests)

    def _speculation(self, drafter: str) -> Speculation | None:
        """Open drafters; a model directory is needed only by those that read a tokenizer."""
        name = self._source
        names = drafter_names(drafter, name, learns=False)
        if set(names) <= set(WEIGHTLESS):
            drafters: tuple[Drafter, ...] = tuple(WEIGHTLESS[each]() for each in names)
        else:
            directory = model_directory(name, field="the model's name_or_path")
            target = Target(
                model=self._policy.model,
                tokenizer=load_tokenizer(directory),
                directory=directory,
                name=name,
            )
            drafters = open_drafters(names, target)
        return Speculation(drafters=drafters, tuner=BudgetTuner()) if drafters else None


_MIRRORS: WeakKeyDictionary[PreTrainedModel, _Mirror] = WeakKeyDictionary()


def _mirror(model: PreTrainedModel) -> _Mirror:
    if model not in _MIRRORS:
        _MIRRORS[model] = _Mirror(model)
    return _MIRRORS[model]


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's parameters by name; refuse those that longtail cannot copy."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    adapters = [name for name in weights if ".lora_" in name or ".base_layer." in name]
    if adapters:
        raise ConfigError(
            f"the model has an adapter ({adapters[0]}): merge it first, with merge_and_unload()"
        )
    for what in ("dtype", "device"):
        values = sorted({str(getattr(tensor, what)) for tensor in weights.values()})
        if len(values) > 1:
            raise ConfigError(
                f"the model's parameters have several {what}s ({', '.join(values)}): load it with "
                "one dtype onto one device"
            )
    return weights
