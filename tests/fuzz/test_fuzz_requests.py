"""Requests of any bytes are answered or refused in one sentence; no failure."""

import asyncio
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.engine.engine import RolloutEngine
from support.serving import NAME, is_free, make_engine, make_model_server

SCALARS = st.sampled_from(
    [
        *("0", "-0", "1", "-1", "1e-46", "5e-324", "1e-400", "1e308", "1e999", "NaN", "-Infinity"),
        *("1e-3", "9.99e-4", "2", "1.0", "01", "1.", ".5", "+1", "0x1", "1e", "true", "null"),
        *(str(2**31), str(2**53), str(2**63 - 1), str(2**63), str(-(2**63) - 1), "9" * 5000),
        *('"\\ud83d"', '"\\ude00\\ud83d"', '"a\\ud83d\\ude00"', '"\\u0000"', '"\ufffe"', '"\\x"'),
        *('"<eos>"', '"<user>"', '""', '"user"', f'"{NAME}"', '"x', '"\\u12"', "[" * 5000),
    ]
)
TEXTS = st.text(max_size=6).map(json.dumps)
VALUES = st.recursive(
    SCALARS | TEXTS | st.integers(1, 120).map(lambda depth: "[" * depth + "]" * depth),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda each: f"[{','.join(each)}]")
        | st.lists(st.tuples(TEXTS, inner), max_size=2).map(
            lambda each: "{" + ",".join(f"{key}:{value}" for key, value in each) + "}"
        )
    ),
    max_leaves=5,
)
"""JSON as it is written, or nearly: what `json.dumps` would not write, too."""
FIELDS = st.sampled_from(
    [
        *("model", "prompt", "messages", "temperature", "top_p", "top_k", "min_p", "n", "stop"),
        *("max_tokens", "max_completion_tokens", "seed", "stream", "stream_options", "logprobs"),
        *("top_logprobs", "echo", "best_of", "logit_bias", "metadata", "user", "tools", "zzz"),
        *("return_token_ids", "return_tokens_as_token_ids"),
    ]
)
GOOD = {
    "/v1/completions": {"prompt": '"a"'},
    "/v1/chat/completions": {"messages": '[{"role":"user","content":"a"}]'},
}


def written(path: str, fields: dict[str, str]) -> bytes:
    """A body, field by field."""
    fields = {"model": f'"{NAME}"', "max_tokens": "2", **GOOD[path], **fields}
    inner = ",".join(f'"{name}":{value}' for name, value in fields.items())
    return f"{{{inner}}}".encode(errors="surrogatepass")


@cache
def the_engine() -> RolloutEngine:
    return make_engine()


async def asked(path: str, body: bytes, *, leaves: bool) -> tuple[int, bytes]:
    """Send one request to the application, which is started and stopped for it.

    A caller that `leaves` hangs up once its body is sent; its answer may be cut or absent.
    """
    served = make_model_server(the_engine())
    scope = {
        **{"type": "http", "method": "POST", "path": path, "raw_path": path.encode()},
        **{"query_string": b"", "scheme": "http"},
        "headers": [(b"host", b"localhost"), (b"content-length", str(len(body)).encode())],
        **{"asgi": {"version": "3.0"}, "server": ("localhost", 80), "root_path": ""},
        **{"http_version": "1.1"},
    }
    sent: list[Any] = []
    inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
    if leaves:
        inbox.put_nowait({"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    served.service.start()
    try:
        await served.app()(scope, inbox.get, send)
    finally:
        await served.service.stop()
    status = sent[0]["status"] if sent else 0
    return status, b"".join(message.get("body", b"") for message in sent)


@pytest.mark.slow
@given(
    path=st.sampled_from(sorted(GOOD)),
    fields=st.dictionaries(FIELDS, VALUES, max_size=3),
    raw=st.none() | st.binary(max_size=200),
    leaves=st.booleans(),
)
def test_the_application_answers_or_refuses_and_keeps_nothing(path, fields, raw, leaves):
    body = written(path, fields) if raw is None else raw
    status, answer = asyncio.run(asked(path, body, leaves=leaves))
    assert is_free(the_engine())
    if leaves:
        assert status < 500, answer
        return
    assert 200 <= status < 500, answer
    answer.decode()
    if status != 200:
        message = json.loads(answer)["error"]["message"]
        assert message
        assert "\n" not in message
