"""Triton's interpreter, three times as fast, and one gap of it closed. Values do not change.

The interpreter replaces the functions of triton.language again at each call of a nested function;
here it does so once in a kernel. It checks every integer operation for overflow, which hash
functions mean to have. Its ranges yield Python integers, which have no `to`.
"""

import builtins
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as language
from triton.runtime import interpreter


def log1p(x: Any) -> Any:
    """Return log(1 + x), which kernels take from the device's library."""
    with np.errstate(divide="ignore"):
        value = np.log1p(x.handle.data)
    return language.tensor(interpreter.TensorHandle(value, x.handle.dtype), x.type)


class _Index(int):
    def to(self, _dtype: Any) -> "_Index":
        return self


class _Scope:
    """Replacements of one kernel or nested function; nested ones are never put back alone."""

    active: list[frozenset[int]] = []  # noqa: RUF012  (one interpreter in a process)

    def __init__(self, languages: frozenset[int], inner: Any) -> None:
        self.inner, self.depth = inner, len(self.active)
        self.active.append(languages)

    def restore(self) -> None:
        del self.active[self.depth :]
        if self.inner is not None:
            self.inner.restore()


def hasten() -> None:
    """Change the interpreter of this process."""
    stock = interpreter._patch_lang
    known: dict[Any, frozenset[int]] = {}

    def patch_lang(function: Any) -> _Scope:
        if function not in known:
            held = function.__globals__.values()
            known[function] = frozenset(id(v) for v in held if v is language or v is language.core)
        done = known[function] in _Scope.active
        return _Scope(known[function], None if done else stock(function))

    interpreter._patch_lang = patch_lang
    interpreter.range = lambda *limits: map(_Index, builtins.range(*limits))
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
