"""Any bytes from a client are answered with a text or a clear refusal, never a server error."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.serving import NAME, is_free, live, make_engine, make_model_server

ENGINE = make_engine()
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "text", NAME, "\ud800", "<user>", "<eos>"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "x"]), inner)
    ),
    max_leaves=6,
)
FIELDS = (
    *("model", "prompt", "messages", "temperature", "top_p", "top_k", "min_p", "n", "max_tokens"),
    *("stop", "seed", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "best_of"),
    *("max_completion_tokens", "presence_penalty", "logit_bias", "tools", "user", "zzz", ""),
)
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    TEXT: {"model": NAME, "prompt": "a", "max_tokens": 2},
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with live(make_model_server(ENGINE)) as client:
        yield client
    assert is_free(ENGINE)


def check(answer: httpx.Response) -> None:
    """Check that an answer is a text or an error of OpenAI's format."""
    if answer.status_code == 200:
        assert answer.text
        return
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from([CHAT, TEXT]),
    changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
    missing=st.sets(st.sampled_from(FIELDS), max_size=1),
)
def test_a_body_with_odd_fields_is_answered_or_refused(
    client: httpx.Client, path: str, changes: dict[str, Any], missing: set[str]
) -> None:
    body = {k: v for k, v in {**BASES[path], **changes}.items() if k not in missing}
    check(client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"}))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from([CHAT, TEXT, "/v1/models/x", "/health/", "/%00", "//"]),
    body=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()),
    kind=st.sampled_from(
        ["application/json", "text/plain", "application/json; charset=latin-9", ""]
    ),
)
def test_any_bytes_are_refused_or_answered(
    client: httpx.Client, path: str, body: bytes, kind: str
) -> None:
    check(client.post(path, content=body, headers={"Content-Type": kind}))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(1, 60), path=st.sampled_from([CHAT, TEXT]))
def test_a_truncated_body_is_refused(client: httpx.Client, cut: int, path: str) -> None:
    body = json.dumps(BASES[path])[:-cut]
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    check(answer)
