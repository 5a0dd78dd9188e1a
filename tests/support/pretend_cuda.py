"""A pretended GPU: tensors that claim the device `cuda:0` and compute on the CPU.

An operation that mixes devices is an error, as on a GPU, so code that was written on a CPU shows
where it would stop there. `load` must come before PyTorch is imported.

    load(folder)
    import torch
    with pretended():
        torch.ones(2, device="cuda")
"""

import ctypes
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

GIGABYTES = 80


def load(folder: Path) -> None:
    """Compile the device into a folder, and let PyTorch find it."""
    torch, library = Path(sysconfig.get_path("purelib")) / "torch", folder / "pretend_cuda.so"
    source = Path(__file__).with_suffix(".cpp")
    command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{torch}/include", str(source)]
    command += [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
    subprocess.run([*command, "-o", str(library)], check=True)
    ctypes.CDLL(str(library))


@contextmanager
def pretended() -> Iterator[list[str]]:
    """Make tensors for the device `cuda` possible in this thread; yield the operations on it."""
    mode, called = _card()
    with mode():
        yield called


@cache
def _card() -> tuple[Any, list[str]]:
    """Let PyTorch believe in the GPU; return the mode for tensors on it, and their operations."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    card, called = torch.device("cuda", 0), list[str]()

    class OnCard(torch.Tensor):
        held: torch.Tensor

        @staticmethod
        def __new__(cls, held: torch.Tensor) -> "OnCard":
            made = torch.Tensor._make_wrapper_subclass(
                cls, held.size(), held.stride(), held.storage_offset(), dtype=held.dtype,
                device=card,
            )  # fmt: skip
            made.held = held
            return made

        def tolist(self) -> Any:
            return self.held.tolist()

        def __deepcopy__(self, memo: Any) -> torch.Tensor:
            copied = OnCard(self.held.detach().clone())
            is_parameter = isinstance(self, torch.nn.Parameter)
            return torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied

        @classmethod
        def __torch_dispatch__(
            cls, call: Any, types: Any, args: Any = (), named: Any = None
        ) -> Any:
            return run(call, args, named or {})

    def run(call: Any, args: Any, named: Any) -> Any:
        given = [each for each in tree_leaves((args, named)) if isinstance(each, torch.Tensor)]
        on_card = [each for each in given if isinstance(each, OnCard)]
        goes = bool(on_card)
        if (device := named.get("device")) is not None:
            goes, named = torch.device(device).type == "cuda", {**named, "device": "cpu"}
        elif on_card and call is not torch.ops.aten.copy_.default:
            strange = [each.shape for each in given if not isinstance(each, OnCard)]
            writes_here = call._schema.is_mutable and not isinstance(given[0], OnCard)
            if any(strange) or writes_here:
                raise RuntimeError(f"{call}: of a tensor on the GPU and {strange} on the CPU")
        args, named = tree_map(lambda x: x.held if isinstance(x, OnCard) else x, (args, named))
        if goes:
            called.append(str(call))
        found = (_OPERATIONS.get(str(call)) or call)(*args, **named)
        own = {id(each.held): each for each in on_card}

        def wrapped(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return own[id(x)] if id(x) in own else OnCard(x) if goes else x

        return tree_map(wrapped, found)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, call: Any, types: Any, args: Any = (), named: Any = None
        ) -> Any:
            return run(call, args, named or {})

    from safetensors import torch as safetensors

    save_file = safetensors.save_file

    def save(tensors: Any, *rest: Any, **named: Any) -> None:  # it reads addresses
        save_file({name: getattr(x, "held", x) for name, x in tensors.items()}, *rest, **named)

    safetensors.save_file = save
    answer()
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # parameters of our class
    return Mode, called


def answer(**more: Any) -> None:
    """Let `torch.cuda` answer for one card as large as an H100, and with `more`."""
    import torch

    size = GIGABYTES * 10**9
    answers: dict[str, Any] = {
        "_lazy_init": None, "is_available": True, "device_count": 1, "current_device": 0,
        "is_bf16_supported": True, "get_device_name": "a pretended GPU",
        "get_device_capability": (9, 0), "mem_get_info": (size, size), "synchronize": None,
        "empty_cache": None, **more,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)


def _visible(starts: Any, window: Any) -> Any:
    """Which keys each token of packed sequences sees, by FlashAttention's documentation."""
    import torch

    ends = starts[1:].tolist()
    sequence = torch.bucketize(torch.arange(ends[-1]), starts[1:].long(), right=True)
    distance = torch.arange(ends[-1])[:, None] - torch.arange(ends[-1])
    left, right = window
    seen = (sequence[:, None] == sequence) & (distance >= -right if right >= 0 else True)
    return seen & (distance <= left) if left >= 0 else seen


def _shares(q: Any, k: Any, starts: Any, window: Any) -> Any:
    """Softmax of attention: [heads, tokens, tokens] in float32, from what FlashAttention admits."""
    import torch

    assert (q.dtype, k.dtype, starts.dtype) == (torch.bfloat16, torch.bfloat16, torch.int32)
    assert q.shape[-1] in range(8, 257, 8)
    scores = _by_head(q, q) @ _by_head(k, q).transpose(1, 2) * q.shape[-1] ** -0.5
    return scores.masked_fill(~_visible(starts, window), float("-inf")).softmax(-1)


def _by_head(x: Any, q: Any) -> Any:
    """[heads of q, tokens, dim] in float32; query heads share a head of keys and values."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1).float()


def _forward(
    q: Any, k: Any, v: Any, starts: Any, ends: Any, longest: int, most: int,
    is_causal: bool = False, scale: Any = None, window: Any = None, *_: Any,
) -> Any:  # fmt: skip
    import torch

    assert longest == most == int(starts.diff().max())
    out = _shares(q, k, starts, window or (-1, 0 if is_causal else -1)) @ _by_head(v, q)
    state = torch.zeros(2, dtype=torch.uint64)
    return out.transpose(0, 1).to(q.dtype).contiguous(), torch.empty(q.shape[1], len(q)), state


def _backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, starts: Any, ends: Any, longest: int,
    most: int, is_causal: bool, state: Any, scale: Any = None, window: Any = None,
) -> Any:  # fmt: skip
    shares = _shares(q, k, starts, window or (-1, 0 if is_causal else -1))
    scale = q.shape[-1] ** -0.5
    grads = _by_head(grad, q)
    pulls = grads @ _by_head(v, q).transpose(1, 2)
    pulls = shares * (pulls - (pulls * shares).sum(-1, keepdim=True)) * scale
    found = (
        pulls @ _by_head(k, q),
        pulls.transpose(1, 2) @ _by_head(q, q),
        shares.transpose(1, 2) @ grads,
    )
    return tuple(
        each.transpose(0, 1).unflatten(1, (x.shape[1], -1)).sum(2).to(x.dtype)
        for each, x in zip(found, (q, k, v), strict=True)
    )


_OPERATIONS = {
    "torch_attn._varlen_attn.default": _forward,
    "torch_attn._varlen_attn_backward.default": _backward,
}
