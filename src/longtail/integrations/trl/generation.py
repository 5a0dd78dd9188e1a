"""TRL's side of the rollouts: the trainer's callback, and longtail in place of `VLLMGeneration`.

The walk over the trainer's parameters (FSDP, ZeRO-3, PEFT) is inherited; everything that calls vLLM
is replaced.
"""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import ProcessorMixin, TrainerCallback
from trl.generation.vllm_generation import VLLMGeneration

from longtail.integrations.trl import sampling


class RolloutsCallback(TrainerCallback):
    """Gives `Rollouts` the trainer's state, and saves the drafter beside the model."""

    def __init__(self, rollouts: Any) -> None:
        self._rollouts = rollouts

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the arguments, before the trainer builds its generator."""
        self._rollouts.follow(args, state)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the state of a training that begins or goes on."""
        self._rollouts.follow(args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Give the trainer the metrics of its rollouts, before it logs the step."""
        self._rollouts.add_metrics()

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

    def _init_vllm(self) -> None:
        """Open the engine; called at the end of the inherited constructor."""
        sampling.refuse_unsupported(self)
        sampling.sampling_params(self, ())  # refuses before any work
        session = self._rollouts.open(self)
        # TRL's loop over tools reads the longest text here.
        longest = SimpleNamespace(max_model_len=session.policy.max_len)
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=longest))

    def sync_weights(self) -> None:
        """Copy the trainer's weights into the engine."""
        parameters: Any = self._iter_named_params  # TRL's has no annotations
        self._rollouts.session.pull(parameters())

    def generate(
        self, prompts: Any, images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[Any, Any, Any, Any]:
        """Return prompts, completions, and the logprob and id of each token."""
        sampling.refuse_images(images)
        params = sampling.sampling_params(self, sampling.end_tokens(self.model, self.tokenizer))
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
