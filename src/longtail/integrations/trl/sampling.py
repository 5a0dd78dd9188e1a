"""TRL's generation settings as sampling parameters; what longtail cannot do is refused by name."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import ProcessorMixin, TrainerCallback
from trl.generation.vllm_generation import VLLMGeneration

from longtail.errors import ConfigError
from longtail.model.hf.ends import Ends
from longtail.types import SamplingParams

_DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")
_NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "logprobs": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "structured_outputs": None,
    "seed": None,
    "ignore_eos": False,
}
"""Settings that change nothing at these values; longtail takes no other value."""
_REMEDIES: Mapping[str, str] = {
    "seed": "give longtail_rollouts(seed=...) instead",
    "repetition_penalty": "set repetition_penalty=1.0",
    "structured_outputs": "leave structured outputs out",
}


def sampling_params(settings: Any, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Return the parameters of a `VLLMGeneration`; `stop_token_ids` end a completion, too.

    Entries of `generation_kwargs` come before settings of the same name, as in TRL. Raises
    ConfigError for a setting that longtail cannot follow.
    """
    extra = dict(settings.generation_kwargs or {})
    values = {name: extra.pop(name, getattr(settings, name)) for name in _DISTRIBUTION}
    max_tokens = extra.pop("max_tokens", settings.max_completion_length)
    stop, more_ids = extra.pop("stop", None) or (), extra.pop("stop_token_ids", None) or ()
    extra.setdefault("repetition_penalty", settings.repetition_penalty)
    for name, value in extra.items():
        if name not in _NEUTRAL:
            raise ConfigError(
                f"generation_kwargs[{name!r}] = {value!r}: longtail does not know it; leave it out"
            )
        if value is not None and value != _NEUTRAL[name]:
            remedy = _REMEDIES.get(name, f"leave it at {_NEUTRAL[name]}")
            raise ConfigError(f"{name} = {value!r}: longtail does not support it; {remedy}")
    return SamplingParams(
        temperature=float(values["temperature"]),
        top_k=max(int(values["top_k"] or 0), 0),  # vLLM's name for all tokens is -1
        top_p=float(values["top_p"]),
        min_p=float(values["min_p"] or 0.0),
        max_tokens=int(max_tokens),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *more_ids))),
    )


def refuse_unsupported(settings: Any) -> None:
    """Raise ConfigError for settings of `VLLMGeneration` with which longtail cannot generate."""
    if settings.structured_outputs_regex is not None:
        raise ConfigError(
            f"vllm_structured_outputs_regex = {settings.structured_outputs_regex!r}: longtail has "
            "no structured outputs; leave it out"
        )
    if settings.mode != "colocate":
        raise ConfigError(
            f"vllm_mode = {settings.mode!r}: longtail generates in the trainer's own processes; "
            "set vllm_mode='colocate'"
        )
    if settings.tensor_parallel_size != 1:
        raise ConfigError(
            f"vllm_tensor_parallel_size = {settings.tensor_parallel_size}: each process generates "
            "with the whole model; set it to 1"
        )


def refuse_images(images: Any) -> None:
    """Raise ConfigError if a prompt has an image."""
    if images is not None and any(images):
        raise ConfigError(
            "images: longtail generates from text only; use prompts without images, or TRL's own "
            "generation"
        )


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a completion: of tokenizer and generation config."""
    listed = None if model.generation_config is None else model.generation_config.eos_token_id
    several = listed if isinstance(listed, list) else [listed]
    found = [tokenizer.eos_token_id, *several]
    return tuple(dict.fromkeys(token for token in found if token is not None))


class RolloutsCallback(TrainerCallback):
    """Gives `Rollouts` the trainer's state, and saves the drafter beside the model."""

    def __init__(self, rollouts: Any) -> None:
        self._rollouts = rollouts

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the arguments before the generator is built, and the state of a training."""
        self._rollouts.follow(args, state)

    on_train_begin = on_init_end

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the drafter beside the trainer's checkpoint."""
        if state.is_world_process_zero:
            self._rollouts.save(Path(args.output_dir) / f"checkpoint-{state.global_step}")


class LongtailGeneration(VLLMGeneration):
    """Generates with the engine of `rollouts`; the other arguments are those of TRL's class."""

    def __init__(self, rollouts: Any, **settings: Any) -> None:
        self._rollouts = rollouts
        super().__init__(**settings)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the trainer, or of its processor."""
        own = self.processing_class
        return own.tokenizer if isinstance(own, ProcessorMixin) else own

    def _params(self) -> SamplingParams:
        ends = Ends.of(self.tokenizer, end_tokens(self.model, self.tokenizer))
        return ends.stopping(sampling_params(self, ends.ids))

    def _init_vllm(self) -> None:
        """Open the engine; called at the end of the inherited constructor."""
        refuse_unsupported(self)
        self._params()  # refuses before any work
        session = self._rollouts.open(self)
        # TRL's loop over tools reads the longest sequence here.
        longest = SimpleNamespace(max_model_len=session.max_len)
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=longest))

    def sync_weights(self) -> None:
        """Copy the trainer's weights into the engine."""
        parameters: Any = self._iter_named_params  # TRL's has no annotations
        self._rollouts.session.pull(parameters())

    def generate(
        self, prompts: Any, images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[Any, Any, Any, Any]:
        """Return prompts, completions, and the logprob and id of each token."""
        refuse_images(images)
        params = self._params()
        with profiler or nullcontext():
            done = self._rollouts.generate(
                [tuple(map(int, prompt)) for prompt in prompts],
                params,
                is_training=bool(self.model.training),
            )
        return (
            prompts,
            [list(each.tokens) for each in done],
            [[[logprob] for logprob in each.logprobs] for each in done],
            [[[token] for token in each.tokens] for each in done],
        )
