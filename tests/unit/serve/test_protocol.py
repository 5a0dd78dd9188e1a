"""The protocol: bodies that are accepted, and fields that are refused by name."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from longtail.serve.protocol import Body, ChatRequest, CompletionRequest, problem

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def refused(kind: type[Body], body: Any) -> tuple[str | None, str]:
    """Return the field that is refused, and why."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(body if isinstance(body, bytes) else json.dumps(body))
    return problem(caught.value)


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_a_prompt_may_be_a_text_or_token_ids_or_several(prompt: Any, read: Any) -> None:
    assert CompletionRequest.model_validate({**TEXT, "prompt": prompt}).prompt == read


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], ["a", ""], ["a", [1, "b"]], [1, "a"], [5.5], [True], 1, None, {}]
)
def test_a_malformed_prompt_is_refused(prompt: Any) -> None:
    field, message = refused(CompletionRequest, {**TEXT, "prompt": prompt})
    assert field is not None
    assert field.startswith("prompt")
    assert "constrained" not in message, "a kind of pydantic's"


@pytest.mark.parametrize(
    "more",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": []},
        {"tool_choice": "none", "response_format": {"type": "text"}},
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
    ChatRequest.model_validate({**CHAT, **more})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0.5),
        ("ignore_eos", True),
        ("top_k", -2),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("reasoning_effort", "high"),
        ("top_p", 0),
        ("n", True),
        ("max_tokens", 0),
        ("seed", 2**63),
        ("stop", ["a"] * 17),
        ("stop_token_ids", ["<eos>"]),
        ("messages", []),
        ("tempature", 1),
    ],
)
def test_unsupported_and_impossible_fields_are_refused_by_name(field: str, value: Any) -> None:
    found, message = refused(ChatRequest, {**CHAT, field: value})
    assert found is not None
    assert found.split(".")[0] == field
    assert message.startswith(field)
    assert len(message) < 200


def test_messages_keep_what_a_chat_template_may_write_and_nothing_empty() -> None:
    extra = {"annotations": [], "tool_calls": [], "audio": None, "refusal": "", "id": "msg_1"}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    tool = {"role": "tool", "content": "7", "tool_call_id": "1"}
    body = {**CHAT, "messages": [{**CHAT["messages"][0], **extra}, calls, tool]}
    found = [each.model_dump() for each in ChatRequest.model_validate(body).messages]
    user = {**CHAT["messages"][0], "refusal": "", "id": "msg_1"}
    assert found == [user, {**calls, "content": ""}, tool]
    for name in ("audio", "function_call", "refusal"):
        body = {**CHAT, "messages": [{**CHAT["messages"][0], name: {"x": 1}}]}
        assert f"{name} is not supported" in refused(ChatRequest, body)[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [("echo", True), ("best_of", 2), ("logprobs", 1), ("logprobs", True), ("logprobs", False)],
)
def test_unsupported_fields_of_completions_are_refused_by_name(field: str, value: Any) -> None:
    assert refused(CompletionRequest, {**TEXT, field: value})[0] == field


def test_the_two_names_of_max_tokens_are_one_field() -> None:
    new = ChatRequest.model_validate({**CHAT, "max_completion_tokens": 2})
    assert new.max_tokens == 2
    both = refused(ChatRequest, {**CHAT, "max_tokens": 1, "max_completion_tokens": 2})
    assert both[0] == "max_completion_tokens"


def test_message_content_may_be_a_list_of_text_parts() -> None:
    def body(content: Any) -> dict[str, Any]:
        return {**CHAT, "messages": [{"role": "user", "content": content, "tool_calls": None}]}

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatRequest.model_validate(body(parts)).messages[0].content == "ab"
    for bad in (None, 1, [{"type": "image_url"}], [*parts, "c"], [{"type": "text"}]):
        assert refused(ChatRequest, body(bad))[0] == "messages.0.content"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"model": "\xff"}',
        b'{"model": "m", "prompt": "a", "stop": "\\ud83d"}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=range(6),
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    assert "must be a JSON object" in refused(CompletionRequest, body)[1]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "1e-400"])
def test_numbers_out_of_range_are_refused_and_extreme_ones_accepted(number: str) -> None:
    body = f'{{"model": "m", "prompt": "a", "top_p": {number}}}'
    assert refused(CompletionRequest, body.encode())[0] == "top_p"
    extreme = {**TEXT, "top_p": 1e-46, "min_p": 1e-300, "top_k": 2**31 - 1, "seed": -(2**63)}
    assert CompletionRequest.model_validate_json(json.dumps(extreme)).top_p == 1e-46
