"""Requests of a soak test: extreme but valid sampling, and invalid bodies with their status.

MODEL stands for the name of the model.
"""

from collections.abc import Mapping
from typing import Any

SAMPLINGS: tuple[Mapping[str, Any], ...] = (
    {},
    {"top_p": 1e-46},  # 0 in float32
    {},
    {"temperature": 0},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"temperature": 1e-3, "top_p": 5e-324},
    {},
    {"temperature": 2, "top_k": 2**31 - 1, "min_p": 0.999999999999},
    {"stop": ["\U0001f600", "\x00", "zzz" * 80]},
    {"top_p": 0.5, "logprobs": 0, "n": 1, "user": "x" * 1000},
)
"""Sampling fields of the request for seed i: entry i modulo the length."""

_TEXT = b'{"model": "MODEL", "prompt": "a", %s}'
BAD: tuple[tuple[bytes, int], ...] = (
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b"\xff\x00", 400),
    (b"\xef\xbb\xbf", 400),
    (b"[" * 100_000, 400),
    (b'{"model": 7}', 400),
    (b'{"model": "another", "prompt": "a"}', 404),
    (b'{"model": "\\ud83d", "prompt": "a"}', 400),
    (b'{"model": "MODEL", "prompt": ""}', 400),
    (b'{"model": "MODEL", "prompt": "a\\ud83d"}', 400),
    (b'{"model": "MODEL", "prompt": "\xed\xa0\xbd"}', 400),
    (b'{"model": "MODEL", "prompt": [1, -2]}', 400),
    (b'{"model": "MODEL", "prompt": [1e300]}', 400),
    (_TEXT % b'"stop": "\\ud83d"', 400),
    (_TEXT % b'"\\ude00": 1', 400),
    (_TEXT % b'"n": 0', 400),
    (_TEXT % b'"n": 1000', 400),
    (_TEXT % b'"temperature": NaN', 400),
    (_TEXT % b'"temperature": 1e-300', 400),
    (_TEXT % b'"temperature": 1e999', 400),
    (_TEXT % b'"top_p": 1e-400', 400),
    (_TEXT % b'"top_k": 1e400', 400),
    (_TEXT % b'"max_tokens": 1000000', 400),
    (_TEXT % b'"seed": 1e99', 400),
    (_TEXT % b'"seed": 9223372036854775808', 400),
    (_TEXT % (b'"seed": ' + b"9" * 5000), 400),
    (_TEXT % (b'"metadata": ' + b"[" * 5000 + b"]" * 5000), 400),
    (_TEXT % b'"tools": [1]', 400),
)
