"""The learned drafter in vLLM's V1 model runner, in the place of its n-gram search."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from longtail.vllm.guards import Patch, check, class_of, learning, module_of
from longtail.vllm.history import sent
from longtail.vllm.learned import Learned, Step
from longtail.vllm.learned_worker import open_learned
from longtail.vllm.v1 import draw_drafts


def patches() -> list[Patch]:
    """Return the replacements; ConfigError if a function is not a known one."""
    runner = class_of("vllm.v1.worker.gpu_model_runner", "GPUModelRunner")
    given = (
        "self scheduler_output sampled_token_ids sampling_metadata hidden_states "
        "sample_hidden_states aux_hidden_states spec_decode_metadata common_attn_metadata "
        "slot_mappings"
    )
    module = module_of("vllm.v1.spec_decode.ngram_proposer")
    search: Any = check(module, "NgramProposer", "vllm_config")

    class Chosen(search):  # type: ignore[misc]
        """A learned drafter for an engine that asks for one, else vLLM's search."""

        def __new__(cls, vllm_config: Any) -> Any:
            return LearnedProposer(vllm_config) if learning(vllm_config) else super().__new__(cls)

    return [
        Patch(owner=module, name="NgramProposer", replacement=Chosen),
        Patch.of(runner, "propose_draft_token_ids", given, _proposing),
    ]


def _proposing(stock: Callable[..., Any]) -> Callable[..., Any]:
    def propose_draft_token_ids(self: Any, *args: Any) -> Any:
        """Draft, with the states at hand; other drafters draft as vLLM has it."""
        if not isinstance(self.drafter, LearnedProposer):
            return stock(self, *args)
        self._draft_probs = self._draft_prob_req_ids = None
        return self.drafter.drafts(self, *args[:4])

    return propose_draft_token_ids


class LearnedProposer:
    """Made by the runner as its drafter."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self.learned: Learned | None = None

    def load_model(self, model: Any) -> None:
        """Do nothing (vLLM calls it): see `open`."""

    def open(self, model: Any) -> None:
        """Read the parts of a target that is loaded."""
        self.learned = open_learned(model, self._config, _drawn)

    def drafts(
        self,
        runner: Any,
        scheduler_output: Any,
        sampled: list[list[int]],
        sampling_metadata: Any,
        states: Tensor,
    ) -> list[list[int]]:
        """Learn from a step and return the drafts of each request."""
        assert self.learned is not None, "vLLM loads the model first"
        texts, batch = self.learned.texts, runner.input_batch
        names = batch.req_ids[: len(sampled)]
        prompt_lens = batch.num_prompt_tokens[: len(names)].tolist()
        lengths = batch.num_tokens_no_spec[: len(names)].tolist()
        texts.keep(runner.requests)
        for index, name in enumerate(names):
            if not texts.is_known(name):
                text = batch.token_ids_cpu_tensor[index, : lengths[index]]
                texts.begin(name, text.to(states.device), prompt_lens[index])
        drafts = scheduler_output.scheduled_spec_decode_tokens
        rejected = [
            len(drafts.get(name, ())) + 1 - len(new) if new else 0
            for name, new in zip(names, sampled, strict=True)
        ]
        newest = [each[-1] if each else 0 for each in sampled]
        rows = [list(map(len, sampled)), rejected, range(len(names)), newest]
        num_sampled, num_rejected, index, newest = sent(rows, states.device)
        keys = getattr(self, "longtail_keys", None)
        is_greedy = keys is None or sampling_metadata.all_greedy
        step = Step(
            states=states,
            tokens=runner.input_ids.gpu,
            positions=runner.positions,
            bounds=runner.query_start_loc.gpu,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            places=index,
            newest=newest,
            temperature=None if is_greedy else sampling_metadata.temperature,
            seeds=index if keys is None else keys,
        )
        depth = getattr(scheduler_output, "num_spec_tokens_to_schedule", None)
        depth = self.learned.block.depth if depth is None else depth
        found = self.learned.step(step, texts.given(names, prompt_lens, lengths), depth)
        return [row[: min(number, depth)] for number, *row in found.tolist()]


def _drawn(
    logits: Tensor, ids: Tensor, index: Tensor, temperature: Tensor | None, keys: Tensor, at: Tensor
) -> Tensor:
    """Draw as the target will."""
    if temperature is None:
        return ids[logits.argmax(-1)]
    return draw_drafts(logits, temperature[index], keys[index], at + 1, ids)
