"""Six defects of vLLM on CPUs.

expand_batch_to_tokens   the kernel writes to an int64 copy and loses it, so that temperatures of
                         verified rows are uninitialised (vllm#55005)
apply_sampling_...       top-k of no rows raises, in a step where no request has a draft
reload_weights           the packed copy of a head that is tied to the embedding keeps old weights
load_weights             packed layers have no place for the weights that a trainer loads
_setup_kernel            experts of a mixture are not packed again, and so read in a wrong layout
vars, in the dispatcher  an engine does not start where numba is imported, as its n-gram search does
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from longtail.vllm.patching import Patch, check, module_of, reloading


def patches() -> list[Patch]:
    """Return the replacements on a CPU; none elsewhere."""
    if not is_cpu():
        return []
    runner = module_of("vllm.v1.worker.cpu_model_runner", "CPUModelRunner")
    return [*defects(), Patch.of(runner, "load_model", "self", _load_model, "load_dummy_weights")]


def defects() -> list[Patch]:
    """Return replacements of functions; `repack_heads` mends one defect by itself."""
    rejection = module_of("vllm.v1.sample.rejection_sampler")
    experts = module_of(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
        "UnquantizedFusedMoEMethod",
    )
    expanded = "x cu_num_tokens num_tokens replace_from replace_to"
    constrained = "logits cu_num_draft_tokens sampling_metadata"
    found = [
        Patch.of(rejection, "expand_batch_to_tokens", expanded, _expand_batch_to_tokens),
        Patch.of(rejection, "apply_sampling_constraints", constrained, _constrain),
        Patch.of(experts, "_setup_kernel", "self layer w13 w2", _setup_kernel),
    ]
    if find_spec("vllm.triton_utils.dispatcher") is not None:  # since vLLM 0.31
        dispatcher = module_of("vllm.triton_utils.dispatcher")
        check(dispatcher, "_rebind_kernels", "overrides")
        found.append(Patch(dispatcher, "vars", _attributes))
    return found


def _constrain(stock: Callable[..., Tensor], logits: Tensor, *rest: Any) -> Tensor:
    return stock(logits, *rest) if len(logits) else logits


def _setup_kernel(
    stock: Callable[..., None], self: Any, layer: Any, w13: Tensor, w2: Tensor
) -> None:
    is_update = self.moe_kernel is not None
    stock(self, layer, w13, w2)
    if is_update:
        self.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _attributes(value: Any) -> Mapping[str, Any]:
    """Return an object's attributes; none of one that has something else in their place."""
    found = value.__dict__
    return found if isinstance(found, Mapping) else {}


def _expand_batch_to_tokens(
    _stock: Any, x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0,
    replace_to: int = 0,
) -> Tensor:  # fmt: skip
    """Repeat each value for its tokens, which end at `cu_num_tokens`; one value may be replaced.

    Example: [0.7, 0.0] of tokens that end at [2, 3] with 0 replaced by 1 is [0.7, 0.7, 1.0]
    """
    counts = cu_num_tokens.long().diff(prepend=cu_num_tokens.new_zeros(1).long())
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts).to(x.dtype)


def is_cpu() -> bool:
    """Return whether vLLM runs on the CPU here."""
    return bool(module_of("vllm.platforms").current_platform.is_cpu())


def repack_heads(model: torch.nn.Module) -> None:
    """Pack heads anew after a reload: vLLM leaves that of a tied head as it was."""
    head = module_of("vllm.model_executor.layers.vocab_parallel_embedding", "ParallelLMHead")
    for module in model.modules():
        if isinstance(module, head):
            module.quant_method.process_weights_after_loading(module)


def _load_model(stock: Callable[..., None], self: Any, *args: Any, **options: Any) -> None:
    """Load the model, which takes new weights in any parts from then on."""
    begin, finish = reloading()
    stock(self, *args, **options)
    model, load, opened = self.model, self.model.load_weights, list[Any]()

    def load_weights(weights: Any) -> Any:
        """Load some weights; the next forward pass ends what the first of them began."""
        if not opened:
            is_packed = not all(each.numel() for each in model.parameters())
            if is_packed:  # the trainer has not begun by itself
                begin(model)
            opened.append(model.register_forward_pre_hook(partial(pack, is_packed)))
        return load(weights)

    def pack(is_ours: bool, *_: Any) -> None:
        opened.pop().remove()
        if is_ours:
            finish(model, self.model_config)
        repack_heads(model)

    model.load_weights = load_weights
