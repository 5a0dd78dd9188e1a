"""The learned drafter in vLLM's V1 model runner, in the place of its n-gram search."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from longtail.vllm.coupled_v1 import draw_drafts
from longtail.vllm.history import sent
from longtail.vllm.learned import Learned, Step
from longtail.vllm.patching import Patch, check, learning, module_of


def patches() -> list[Patch]:
    """Return the replacements; ConfigError if a function is not a known one."""
    runner = module_of("vllm.v1.worker.gpu_model_runner", "GPUModelRunner")
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
            return LearnedProposer() if learning(vllm_config) else super().__new__(cls)

    return [
        Patch(module, "NgramProposer", Chosen),
        Patch.of(runner, "propose_draft_token_ids", given, _propose_draft_token_ids),
    ]


class LearnedProposer:
    """Made by the runner as its drafter; `learned` is there once the target is loaded."""

    learned: Learned | None = None

    def load_model(self, model: Any) -> None:
        """Do nothing (vLLM calls it): see `learned_worker`."""

    def draw(
        self, logits: Tensor, ids: Tensor, index: Tensor, temperature: Tensor | None, keys: Tensor,
        at: Tensor,
    ) -> Tensor:  # fmt: skip
        """Draw as the target will."""
        if temperature is None:
            return ids[logits.argmax(-1)]
        return draw_drafts(logits, temperature[index], keys[index], at + 1, ids)


def _propose_draft_token_ids(stock: Callable[..., Any], self: Any, *args: Any) -> Any:
    """Learn from a step and return the drafts of each request; others draft as vLLM has it."""
    if not isinstance(self.drafter, LearnedProposer):
        return stock(self, *args)
    self._draft_probs = self._draft_prob_req_ids = None
    scheduler_output, sampled, sampling_metadata, states, *_ = args
    learned, batch = self.drafter.learned, self.input_batch
    assert learned is not None, "vLLM loads the model first"
    names = batch.req_ids[: len(sampled)]
    prompt_lens = batch.num_prompt_tokens[: len(names)].tolist()
    lengths = batch.num_tokens_no_spec[: len(names)].tolist()
    for row in learned.sequences.keep(self.requests, names):
        sequence = batch.token_ids_cpu_tensor[row, : lengths[row]]
        learned.sequences.begin(names[row], sequence.to(states.device), prompt_lens[row])
    drafts = scheduler_output.scheduled_spec_decode_tokens
    rejected = [
        len(drafts.get(name, ())) + 1 - len(new) if new else 0
        for name, new in zip(names, sampled, strict=True)
    ]
    last = [each[-1] if each else 0 for each in sampled]
    given = [list(map(len, sampled)), rejected, range(len(names)), last]
    num_sampled, num_rejected, index, newest = sent(given, states.device)
    keys = getattr(self.drafter, "longtail_keys", None)
    is_greedy = keys is None or sampling_metadata.all_greedy
    step = Step(
        states=states,
        tokens=self.input_ids.gpu,
        positions=self.positions,
        bounds=self.query_start_loc.gpu,
        num_sampled=num_sampled,
        num_rejected=num_rejected,
        places=index,
        newest=newest,
        temperature=None if is_greedy else sampling_metadata.temperature,
        seeds=index if keys is None else keys,
    )
    depth = getattr(scheduler_output, "num_spec_tokens_to_schedule", None)
    depth = learned.block.depth if depth is None else depth
    found = learned.step(step, learned.sequences.given(names, prompt_lens, lengths), depth)
    return [chain[: min(number, depth)] for number, *chain in found.tolist()]
