"""Requests of any bytes: a call that can be served, or a refusal in one sentence; never a failure.

The parser alone, then the whole application in this process, without sockets.
"""

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.engine.engine import RolloutEngine
from longtail.errors import JsonError
from longtail.serve.protocol import APIError, ChatCompletionRequest, CompletionRequest, parse_body
from longtail.system.strict_json import find_surrogate, parse_json
from support.serving import NAME, is_free, make_engine, make_model_server

NUMBERS = st.sampled_from(
    [
        *("0", "-0", "1", "-1", "1e-46", "1e-300", "5e-324", "1e-400", "1e308", "1e999", "-1e999"),
        *("NaN", "Infinity", "-Infinity", "0.999999999999999999", "1e-3", "9.99e-4", "2", "1.0"),
        *(str(2**31), str(2**53), str(2**63 - 1), str(2**63), str(-(2**63) - 1), "9" * 400),
        *("9" * 5000, "-" + "9" * 309, "01", "1.", ".5", "+1", "0x1", "1e", "true", "null"),
    ]
)
TEXTS = st.text(max_size=6).map(json.dumps) | st.sampled_from(
    [
        *(
            '"\\ud83d"',
            '"\\ude00\\ud83d"',
            '"a\\ud83d\\ude00"',
            '"\\u0000"',
            '"\ufffe"',
            '"\U0001f600"',
        ),
        *(
            '"<eos>"',
            '"<user>"',
            '""',
            '"\\uD800"',
            '"user"',
            f'"{NAME}"',
            '"x',
            '"\\x"',
            '"\\u12"',
        ),
        '"' + "ab " * 300 + '"',
    ]
)
DEEP = st.integers(1, 120).map(lambda depth: "[" * depth + "]" * depth) | st.just("[" * 5000)
VALUES = st.recursive(
    NUMBERS | TEXTS | DEEP,
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
    ]
)
GOOD = {
    "prompt": {"model": f'"{NAME}"', "prompt": '"a"', "max_tokens": "2"},
    "messages": {
        "model": f'"{NAME}"',
        "messages": '[{"role":"user","content":"a"}]',
        "max_tokens": "2",
    },
}
PATHS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}
KINDS = {"prompt": CompletionRequest, "messages": ChatCompletionRequest}


def written(fields: dict[str, str]) -> bytes:
    """A body, field by field."""
    inner = ",".join(f'"{name}":{value}' for name, value in fields.items())
    return f"{{{inner}}}".encode(errors="surrogatepass")


BODIES = st.tuples(st.sampled_from(sorted(GOOD)), st.dictionaries(FIELDS, VALUES, max_size=3)).map(
    lambda drawn: (drawn[0], written({**GOOD[drawn[0]], **drawn[1]}))
)


def check_sentence(message: str) -> None:
    assert message
    assert "\n" not in message
    assert find_surrogate(message) is None


def check_refusal(refusal: APIError) -> None:
    assert 400 <= refusal.status < 500
    check_sentence(refusal.message)
    json.dumps(refusal.body(), ensure_ascii=False).encode()


@pytest.mark.slow
@given(body=st.binary(max_size=200) | BODIES.map(lambda drawn: drawn[1]) | VALUES.map(str.encode))
def test_json_is_a_plain_value_or_one_sentence(body: bytes) -> None:
    for allow_nan in (True, False):
        try:
            value = parse_json(body, allow_nan=allow_nan)
        except JsonError as error:
            check_sentence(str(error))
            continue
        text = json.dumps(value, ensure_ascii=False, allow_nan=allow_nan)
        text.encode()
        assert json.dumps(parse_json(text, allow_nan=allow_nan), ensure_ascii=False) == text


@given(drawn=BODIES)
def test_a_body_is_a_call_or_a_refusal(drawn: tuple[str, bytes]) -> None:
    field, body = drawn
    try:
        call = parse_body(KINDS[field], body)
    except APIError as refusal:
        check_refusal(refusal)
        return
    assert all(find_surrogate(stop) is None for stop in call.stop)
    assert call.seed is None or -(2**63) <= call.seed < 2**63


@given(body=st.binary(max_size=200), field=st.sampled_from(sorted(KINDS)))
def test_any_bytes_are_a_call_or_a_refusal(body: bytes, field: str) -> None:
    try:
        parse_body(KINDS[field], body)
    except APIError as refusal:
        check_refusal(refusal)


@cache
def the_engine() -> RolloutEngine:
    return make_engine()


async def asked(path: str, body: bytes, *, leaves: bool = False) -> tuple[int, bytes]:
    """Send one request to the application, which is started and stopped for it.

    A caller that `leaves` hangs up once its body is sent; its answer may be cut or absent.
    """
    served = make_model_server(the_engine(), rl_dir=Path(__file__).parent)
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        **{"type": "http", "method": "POST", "path": path, "raw_path": path.encode()},
        **{"query_string": b"", "headers": headers, "scheme": "http", "http_version": "1.1"},
        **{"asgi": {"version": "3.0"}, "server": ("localhost", 80), "root_path": ""},
    }
    sent: list[dict[str, Any]] = []
    inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
    if leaves:
        inbox.put_nowait({"type": "http.disconnect"})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    served.service.start()
    try:
        await served.app(scope, inbox.get, send)
    finally:
        await served.service.stop()
    status = sent[0]["status"] if sent else 0
    return status, b"".join(message.get("body", b"") for message in sent)


@pytest.mark.slow
@given(drawn=BODIES, leaves=st.booleans())
def test_the_application_answers_or_refuses_and_keeps_nothing(
    drawn: tuple[str, bytes], leaves: bool
) -> None:
    field, body = drawn
    status, answer = asyncio.run(asked(PATHS[field], body, leaves=leaves))
    assert is_free(the_engine())
    if leaves:
        assert status < 500, answer
        return
    assert status == 200 or 400 <= status < 500, answer
    answer.decode()
    if status != 200:
        assert json.loads(answer)["error"]["message"]


@pytest.mark.slow
@given(
    update=st.dictionaries(
        st.sampled_from(["directory", "version", "sha256", "zzz"]), VALUES, max_size=4
    ),
    drafter=VALUES | st.text(max_size=6).map(json.dumps),
    is_drafter=st.booleans(),
)
def test_an_update_without_weights_is_refused(
    update: dict[str, str], drafter: str, is_drafter: bool
) -> None:
    info = written(update).decode(errors="surrogatepass")
    path, fields = "/update_weights", {"update_info": info}
    if is_drafter:
        path, fields = "/update_drafter", {"drafter": drafter}
    status, answer = asyncio.run(asked(path, written(fields)))
    assert 400 <= status < 500, answer
    check_sentence(json.loads(answer)["error"]["message"])
    assert is_free(the_engine())
