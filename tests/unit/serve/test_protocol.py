"""The protocol: what is read, and what is refused by the name of the field."""

import json
from typing import Any

import pytest

from longtail.serve.protocol import APIError, ChatCall, CompletionCall, read_call

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def refused(kind: type[ChatCall] | type[CompletionCall], body: Any) -> APIError:
    with pytest.raises(APIError) as caught:
        read_call(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_may_be_one_or_several_of_text_or_tokens(prompt: Any, read: Any) -> None:
    assert CompletionCall.model_validate({**TEXT, "prompt": prompt}).prompt == read


@pytest.mark.parametrize(
    "more",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": []},
        {"tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"temperature": None, "top_p": None, "n": None, "stop": None, "seed": None},
        {"stream": None, "max_tokens": None, "logprobs": None, "top_logprobs": 0},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
)
def test_what_changes_nothing_is_taken(more: dict[str, Any]) -> None:
    ChatCall.model_validate({**CHAT, **more})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("tools", [{"type": "function"}]),
        ("functions", [{}]),
        ("tool_choice", "auto"),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["audio"]),
        ("audio", {}),
        ("reasoning_effort", "high"),
        ("top_logprobs", 3),
        ("temperature", -0.1),
        ("temperature", 1e-30),
        ("temperature", "1"),
        ("top_p", 0),
        ("min_p", 1),
        ("n", 0),
        ("n", True),
        ("n", 1.5),
        ("max_tokens", 0),
        ("seed", 2**63),
        ("seed", "1"),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", [1]),
        ("stop", "x" * 257),
        ("messages", []),
        ("messages", "hi"),
        ("stream", "yes"),
        ("tempature", 1),
    ],
)
def test_what_would_change_the_text_unserved_or_cannot_be_is_refused_by_name(
    field: str, value: Any
) -> None:
    found = refused(ChatCall, {**CHAT, field: value})
    assert found.status == 400
    assert found.param == field
    assert field in found.message


@pytest.mark.parametrize(
    ("field", "value"),
    [("echo", True), ("suffix", "x"), ("best_of", 2), ("logprobs", 1), ("logprobs", True)],
)
def test_completions_refuse_what_they_do_not_serve(field: str, value: Any) -> None:
    assert refused(CompletionCall, {**TEXT, field: value}).param == field


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], ["a", ""], ["a", 1], [1, "a"], [True], 1, None, {}, [[1.0]]]
)
def test_a_prompt_that_is_none_is_refused(prompt: Any) -> None:
    assert refused(CompletionCall, {**TEXT, "prompt": prompt}).param == "prompt"


def test_content_may_come_in_parts_of_text_alone() -> None:
    def read(content: Any) -> ChatCall:
        return ChatCall.model_validate({**CHAT, "messages": [{"role": "user", "content": content}]})

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read(parts).messages[0].content == "ab"
    for bad in (None, 1, [{"type": "image_url"}], [*parts, "c"], [{"type": "text"}]):
        found = refused(ChatCall, {**CHAT, "messages": [{"role": "user", "content": bad}]})
        assert found.param == "messages.0.content"


def test_two_names_of_one_limit_and_options_without_a_stream_are_refused() -> None:
    both = refused(ChatCall, {**CHAT, "max_tokens": 1, "max_completion_tokens": 2})
    assert both.param == "max_tokens"
    alone = refused(ChatCall, {**CHAT, "stream_options": {"include_usage": True}})
    assert alone.param == "stream_options"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{", "not valid JSON"),
        (b'{"model": "\xff"}', "not UTF-8"),
        (b'{"model": "m", "prompt": "a", "stop": "\\ud83d"}', "half of a surrogate pair"),
        (b'{"\\ud83d": 1}', "half of a surrogate pair"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"top_p": Infinity}', "Infinity is not a JSON number"),
        (b'{"top_p": 1e999}', "too large"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "has 5000 digits"),
        (b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested more than 100 deep"),
        (b"[]", "must be a JSON object"),
        (b"7", "must be a JSON object"),
    ],
    ids=range(11),
)
def test_a_body_that_is_no_strict_json_is_refused_in_a_sentence(body: bytes, sentence: str) -> None:
    found = refused(CompletionCall, body)
    assert (found.status, found.code) == (400, "invalid_json")
    assert sentence in found.message


def test_extreme_numbers_that_are_in_range_are_read() -> None:
    body = {**TEXT, "top_p": 1e-46, "min_p": 1e-300, "top_k": 2**31 - 1, "seed": -(2**63)}
    assert read_call(CompletionCall, json.dumps(body).encode()).top_p == 1e-46


def test_a_long_value_is_not_sent_back_whole() -> None:
    found = refused(ChatCall, {**CHAT, "stop": "x" * 5000})
    assert len(found.message) < 200


def test_an_envelope_is_openais() -> None:
    refusal = APIError(404, "no", param="model", code="model_not_found")
    assert refusal.envelope() == {
        "error": {
            "message": "no",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
    kinds = {401: "authentication_error", 429: "rate_limit_error", 503: "server_error"}
    for status, kind in kinds.items():
        assert APIError(status, "no").envelope()["error"]["type"] == kind
