"""Two defects of vLLM's CPU speculation, and linear layers in blocks of equal height.

expand_batch_to_tokens   the kernel writes to an int64 copy and loses it, so that temperatures of
                         verified rows are uninitialised (vllm#55005)
apply_sampling_...       top-k of no rows raises, in a step where no request has a draft

Each is replaced only if a trial shows the defect. The trials run at first use, since vLLM installs
its CPU kernels after plugins are loaded.

vLLM's CPU products sum in another order at another number of rows, and nothing else in its forward
pass does. Where each linear layer multiplies blocks of a fixed number of rows, a row depends on no
neighbour in bfloat16 either. This costs time: short blocks are filled up with zeros.
"""

import logging
import time
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from longtail.integrations.vllm.guards import Patch, Signature, check, class_of, module_of, names
from longtail.integrations.vllm.settings import VllmSettings

_PRICED = (8, 40)
"""Rows of steps whose price is logged: 8 requests, plain and with 4 drafts each."""
_WIDTHS = ("input_size_per_partition", "embedding_dim", "in_features")
"""Attributes that hold the width of a layer's input."""
logger = logging.getLogger("vllm.plugins.longtail")
_EXPAND = Signature(
    first=names("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
)
_CONSTRAIN = Signature(first=names("logits", "cu_num_draft_tokens", "sampling_metadata"))
_TRUNCATE = Signature(first=names("logits", "k", "p"))
_LOAD = Signature(first=names("self"), then=("load_dummy_weights",))


def patches(settings: VllmSettings) -> list[Patch]:
    """Return the replacements on a CPU; none elsewhere."""
    if not is_cpu():
        return []
    found = defects()
    if settings.block_rows is not None:
        runner = class_of("vllm.v1.worker.cpu_model_runner", "CPUModelRunner")
        load = check(runner, "load_model", _LOAD)
        made = _loading_blocks(load, settings.block_rows)
        found.append(Patch(owner=runner, name="load_model", replacement=made))
    return found


def defects() -> list[Patch]:
    """Return replacements of the two functions, which try vLLM's own at first use."""
    rejection = module_of("vllm.v1.sample.rejection_sampler")
    truncate = check(
        module_of("vllm.v1.sample.ops.topk_topp_sampler"), "apply_top_k_top_p", _TRUNCATE
    )
    new = {
        "expand_batch_to_tokens": _expanding(check(rejection, "expand_batch_to_tokens", _EXPAND)),
        "apply_sampling_constraints": _constraining(
            check(rejection, "apply_sampling_constraints", _CONSTRAIN), truncate
        ),
    }
    return [Patch(owner=rejection, name=name, replacement=made) for name, made in new.items()]


def is_cpu() -> bool:
    """Return whether vLLM runs on the CPU here."""
    return bool(module_of("vllm.platforms").current_platform.is_cpu())


def loses_expanded(expand_batch_to_tokens: Callable[..., Tensor]) -> bool:
    """Return whether vLLM's own expansion of temperatures loses its result."""
    ends = torch.tensor([1, 3], dtype=torch.int32)
    for values in ((0.75, 0.25), (0.5, 0.125)):  # twice, as old memory may happen to be right
        expanded = expand_batch_to_tokens(torch.tensor(values), ends, 3, 0, 1)
        if expanded.tolist() != [values[0], values[1], values[1]]:
            return True
    return False


def fails_without_rows(apply_top_k_top_p: Callable[..., Tensor]) -> bool:
    """Return whether vLLM's truncation raises if no row is given."""
    try:
        apply_top_k_top_p(torch.empty(0, 4), torch.empty(0, dtype=torch.int32), None)
    except (IndexError, RuntimeError):
        return True
    return False


def _expanding(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    is_defective = cache(lambda: loses_expanded(stock))

    @wraps(stock)
    def expand_batch_to_tokens(
        x: Tensor,
        cu_num_tokens: Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> Tensor:
        if is_defective():
            return expand(x, cu_num_tokens, replace_from, replace_to)
        return stock(x, cu_num_tokens, num_tokens, replace_from, replace_to)

    return expand_batch_to_tokens


def expand(x: Tensor, ends: Tensor, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Repeat each value for its tokens, which end at `ends`; one value may be replaced.

    Example: expand(tensor([0.7, 0.0]), tensor([2, 3]), 0, 1) is [0.7, 0.7, 1.0]
    """
    counts = ends.long().diff(prepend=ends.new_zeros(1).long())
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts).to(x.dtype)


def _constraining(
    stock: Callable[..., Tensor], truncate: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    is_defective = cache(lambda: fails_without_rows(truncate))

    @wraps(stock)
    def apply_sampling_constraints(logits: Tensor, *rest: Any) -> Tensor:
        return logits if not len(logits) and is_defective() else stock(logits, *rest)

    return apply_sampling_constraints


# ---- blocks of rows


def _loading_blocks(stock: Callable[..., None], rows: int) -> Callable[..., None]:
    @wraps(stock)
    def load_model(self: Any, *args: Any, **options: Any) -> None:
        stock(self, *args, **options)
        prices = [f"{price(self.model, rows, each):.1f}x at {each} rows" for each in _PRICED]
        number = fix_rows(self.model, rows)
        logger.warning(
            "longtail: %d linear layers compute blocks of %d rows, so that texts do not depend on "
            "the batch in bfloat16; they take %s as long",
            number,
            rows,
            " and ".join(prices),
        )

    return load_model


def price(model: torch.nn.Module, rows: int, height: int) -> float:
    """Return the time of all products with an input of `height` rows in blocks, over that without.

    Layers whose input width is not known are left out.
    """
    took = [0.0, 0.0]
    for module in model.modules():
        made: Any = module
        width = next((w for name in _WIDTHS if (w := getattr(module, name, None))), None)
        if "cpu_linear" not in vars(module) or width is None:
            continue
        x = torch.zeros(height, width, dtype=next(model.parameters()).dtype)
        for index, product in enumerate((made.cpu_linear, in_blocks(made.cpu_linear, rows))):
            product(x, made.weight, None)
            started = time.perf_counter()
            product(x, made.weight, None)
            took[index] += time.perf_counter() - started
    return took[1] / took[0] if took[0] else 1.0


def fix_rows(model: torch.nn.Module, rows: int) -> int:
    """Set every linear layer of a CPU model to blocks of `rows` rows; return their number.

    Products of mixtures of experts are not among them.
    """
    found = [module for module in model.modules() if "cpu_linear" in vars(module)]
    for module in found:
        holder: Any = module
        holder.cpu_linear = in_blocks(holder.cpu_linear, rows)
    return len(found)


def in_blocks(product: Callable[..., Tensor], rows: int) -> Callable[..., Tensor]:
    """Return a product that is computed in blocks of `rows` rows, the last filled up with zeros."""

    def blocks(x: Tensor, weight: Any, bias: Any) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        padded = torch.nn.functional.pad(flat, (0, 0, 0, -len(flat) % rows))
        results = [product(block, weight, bias) for block in torch.split(padded, rows)]
        return torch.cat(results)[: len(flat)].view(*x.shape[:-1], -1)

    return blocks
