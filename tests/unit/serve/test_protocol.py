"""The protocol: bodies that are accepted, and fields that are refused by name."""

import json
from typing import Any

import pytest

from longtail.serve.protocol import APIError, ChatCompletionRequest, CompletionRequest, parse_body

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def refused(kind: type[ChatCompletionRequest] | type[CompletionRequest], body: Any) -> APIError:
    with pytest.raises(APIError) as caught:
        parse_body(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
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
def test_a_prompt_may_be_a_text_or_token_ids_or_several(prompt: Any, read: Any) -> None:
    assert CompletionRequest.model_validate({**TEXT, "prompt": prompt}).prompt == read


@pytest.mark.parametrize(
    "more",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": []},
        {"tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"repetition_penalty": 1.0, "top_k": -1, "min_tokens": 0, "ignore_eos": False},
        {"stop_token_ids": [], "skip_special_tokens": True, "include_stop_str_in_output": False},
        {"return_token_ids": True, "return_tokens_as_token_ids": False},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"temperature": None, "top_p": None, "n": None, "stop": None, "seed": None},
        {"stream": None, "max_tokens": None, "logprobs": None, "top_logprobs": 0},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
)
def test_fields_without_an_effect_are_accepted(more: dict[str, Any]) -> None:
    ChatCompletionRequest.model_validate({**CHAT, **more})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("repetition_penalty", "1.0"),
        ("min_tokens", 3),
        ("ignore_eos", True),
        ("stop_token_ids", [5]),
        ("top_k", -2),
        ("return_token_ids", "yes"),
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
def test_unsupported_and_impossible_fields_are_refused_by_name(field: str, value: Any) -> None:
    found = refused(ChatCompletionRequest, {**CHAT, field: value})
    assert found.status == 400
    assert found.param == field
    assert field in found.message


@pytest.mark.parametrize(
    ("field", "value"),
    [("echo", True), ("suffix", "x"), ("best_of", 2), ("logprobs", 1), ("logprobs", True)],
)
def test_unsupported_fields_of_completions_are_refused_by_name(field: str, value: Any) -> None:
    assert refused(CompletionRequest, {**TEXT, field: value}).param == field


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], ["a", ""], ["a", 1], [1, "a"], [True], 1, None, {}, [[1.0]]]
)
def test_a_malformed_prompt_is_refused(prompt: Any) -> None:
    assert refused(CompletionRequest, {**TEXT, "prompt": prompt}).param == "prompt"


def test_message_content_may_be_a_list_of_text_parts() -> None:
    def read(content: Any) -> ChatCompletionRequest:
        return ChatCompletionRequest.model_validate(
            {**CHAT, "messages": [{"role": "user", "content": content}]}
        )

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read(parts).messages[0].content == "ab"
    for bad in (None, 1, [{"type": "image_url"}], [*parts, "c"], [{"type": "text"}]):
        found = refused(
            ChatCompletionRequest, {**CHAT, "messages": [{"role": "user", "content": bad}]}
        )
        assert found.param == "messages.0.content"


def test_contradictory_fields_are_refused() -> None:
    both = refused(ChatCompletionRequest, {**CHAT, "max_tokens": 1, "max_completion_tokens": 2})
    assert both.param == "max_tokens"
    alone = refused(ChatCompletionRequest, {**CHAT, "stream_options": {"include_usage": True}})
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
def test_a_body_that_is_not_strict_json_is_refused(body: bytes, sentence: str) -> None:
    found = refused(CompletionRequest, body)
    assert (found.status, found.code) == (400, "invalid_json")
    assert sentence in found.message


def test_extreme_numbers_in_range_are_accepted() -> None:
    body = {**TEXT, "top_p": 1e-46, "min_p": 1e-300, "top_k": 2**31 - 1, "seed": -(2**63)}
    assert parse_body(CompletionRequest, json.dumps(body).encode()).top_p == 1e-46


def test_a_long_value_is_shortened_in_the_error() -> None:
    found = refused(ChatCompletionRequest, {**CHAT, "stop": "x" * 5000})
    assert len(found.message) < 200


def test_an_error_body_has_openais_format() -> None:
    refusal = APIError(404, "no", param="model", code="model_not_found")
    assert refusal.body() == {
        "error": {
            "message": "no",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
    kinds = {401: "authentication_error", 429: "rate_limit_error", 503: "server_error"}
    for status, kind in kinds.items():
        assert APIError(status, "no").body()["error"]["type"] == kind
