"""The routes over real HTTP: responses, streams, refusals and metrics."""

import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from longtail.engine.engine import RolloutEngine
from longtail.serve.middleware import Access
from longtail.serve.server import make_server, running
from support.serving import (
    LIMITS,
    NAME,
    FailingEngine,
    HeldEngine,
    PoisonedEngine,
    SlowlyCountedEngine,
    is_free,
    live,
    make_engine,
    make_model_server,
)
from support.tiny_models import byte_level_tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return make_engine()


@pytest.fixture(scope="module")
def client(engine: RolloutEngine) -> Iterator[httpx.Client]:
    with live(make_model_server(engine)) as client:
        yield client


def chat(text: str = "3+4?", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": NAME, "messages": messages, "max_tokens": 12, "seed": 5, **more}


def prompt(text: Any = "3+4=", **more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": text, "max_tokens": 12, "seed": 5, **more}


def events(answer: httpx.Response) -> list[Any]:
    """Return the events of a stream without its end marker."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_served_model_is_listed_and_others_are_not_found(client: httpx.Client) -> None:
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == [NAME]
    assert client.get(f"/v1/models/{NAME}").json()["max_model_len"] == LIMITS.max_len
    for answer in (client.get("/v1/models/a/b"), client.post(CHAT, json=chat(model="a/b"))):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


def test_a_response_has_openais_format_and_counts_its_tokens(client: httpx.Client) -> None:
    answer = client.post(CHAT, json=chat(n=2))
    found = answer.json()
    assert found["object"] == "chat.completion"
    assert found["id"].startswith("chatcmpl-")
    assert [each["index"] for each in found["choices"]] == [0, 1]
    assert {each["message"]["role"] for each in found["choices"]} == {"assistant"}
    usage = found["usage"]
    assert usage["prompt_tokens"] == len("3+4?") + 3  # <user> <eos> <assistant>
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert found["longtail"]["seed"] == 5 == int(answer.headers["x-longtail-seed"])
    assert found["longtail"]["accept_length"] is None  # no drafter


def test_a_drawn_seed_is_reported_and_reproduces_the_text(
    client: httpx.Client,
) -> None:
    first = client.post(TEXT, json=prompt(seed=None)).json()
    other = client.post(TEXT, json=prompt(seed=None)).json()
    again = client.post(TEXT, json=prompt(seed=first["longtail"]["seed"])).json()
    assert first["longtail"]["seed"] != other["longtail"]["seed"]
    assert first["choices"] == again["choices"]


def test_a_stream_joins_to_the_text_of_the_whole_response(client: httpx.Client) -> None:
    for path, body in ((CHAT, chat(n=3)), (TEXT, prompt(["a", "b"], n=2))):
        whole = client.post(path, json=body).json()
        pieces = events(client.post(path, json={**body, "stream": True}))
        for choice in whole["choices"]:
            mine = [c for p in pieces for c in p["choices"] if c["index"] == choice["index"]]
            if path == CHAT:
                assert mine[0]["delta"]["role"] == "assistant"
                joined = "".join(c["delta"]["content"] for c in mine)
                assert joined == choice["message"]["content"]
            else:
                assert "".join(c["text"] for c in mine) == choice["text"]
            reasons = [c["finish_reason"] for c in mine]
            assert reasons == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert all("usage" not in piece for piece in pieces)


def test_a_stream_ends_with_its_usage_if_the_client_asks_for_it(client: httpx.Client) -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    *_, last = events(client.post(CHAT, json=body))
    whole = client.post(CHAT, json=chat()).json()
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["longtail"] == whole["longtail"]


def test_logprobs_cover_every_token_streamed_or_not(client: httpx.Client) -> None:
    whole = client.post(CHAT, json=chat(logprobs=True)).json()
    (choice,) = whole["choices"]
    rows = choice["logprobs"]["content"]
    assert len(rows) == whole["usage"]["completion_tokens"]
    assert "".join(row["token"] for row in rows) == choice["message"]["content"]
    assert all(row["logprob"] < 0 and row["top_logprobs"] == [] for row in rows)
    assert all(bytes(row["bytes"]).decode() == row["token"] for row in rows)
    pieces = events(client.post(CHAT, json=chat(logprobs=True, stream=True)))
    assert [r for p in pieces for r in p["choices"][0]["logprobs"]["content"]] == rows
    (columns,) = client.post(TEXT, json=prompt(logprobs=0)).json()["choices"]
    listed = columns["logprobs"]
    for token, offset in zip(listed["tokens"], listed["text_offset"], strict=True):
        assert columns["text"][offset : offset + len(token)] == token


def test_a_stop_string_ends_the_text_before_it(client: httpx.Client) -> None:
    text = client.post(TEXT, json=prompt(max_tokens=60)).json()["choices"][0]["text"]
    stop = text[7:9]
    cut = text[: text.index(stop)]
    (choice,) = client.post(TEXT, json=prompt(max_tokens=60, stop=stop)).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (cut, "stop")
    streamed = events(client.post(TEXT, json=prompt(max_tokens=60, stop=[stop], stream=True)))
    assert "".join(piece["choices"][0]["text"] for piece in streamed) == cut


def test_a_prompt_of_token_ids_is_answered_as_its_text(client: httpx.Client) -> None:
    from support.serving import shared_tokenizer

    tokens = list(shared_tokenizer().encode("3+4="))
    by_text, by_tokens = (
        client.post(TEXT, json=prompt(each)).json()["choices"] for each in ("3+4=", tokens)
    )
    assert by_text == by_tokens


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, prompt("x" * 128), "prompt"),
        (TEXT, prompt([1, 999]), "prompt"),
        (TEXT, prompt([-1]), "prompt"),
        (TEXT, prompt(max_tokens=101), "max_tokens"),
        (TEXT, prompt("x" * 100, max_tokens=29), "max_tokens"),
        (TEXT, prompt(n=5), "n"),
        (TEXT, prompt(["a", "b"], n=3), "n"),
        (CHAT, chat("x" * 128), "messages"),
        (CHAT, chat(n=5), "n"),
    ],
)
def test_calls_beyond_the_limits_are_refused(
    client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_chat_without_max_tokens_may_fill_the_context(client: httpx.Client) -> None:
    body = chat("x" * 90)
    del body["max_tokens"]
    found = client.post(CHAT, json=body).json()
    reason, written = found["choices"][0]["finish_reason"], found["usage"]["completion_tokens"]
    assert reason == "stop" or written == LIMITS.max_len - found["usage"]["prompt_tokens"]


def test_a_prompt_that_is_too_long_is_refused_before_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("tokenized")

    limits = dataclasses.replace(LIMITS, max_body_kb=4096)
    tokenizer = byte_level_tokenizer()
    monkeypatch.setattr(type(tokenizer), "encode", never)
    access = Access(limits=limits)
    server = make_server(lambda: make_engine(limits=limits), tokenizer, access, name=NAME)
    with live(server) as client:
        answer = client.post(TEXT, json=prompt("a" * 2**20))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "prompt has at least 209716 tokens" in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"1", b"\xff\xfe", b'{"model": NaN}', b"[" * 4000]
)
def test_a_body_that_is_no_json_object_is_refused(client: httpx.Client, body: bytes) -> None:
    answer = client.post(TEXT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/v1/nothing", TEXT])
def test_head_is_answered_as_get_without_a_body(client: httpx.Client, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_other_content_types_and_unknown_routes_are_refused(client: httpx.Client) -> None:
    assert client.post(TEXT, data={"a": "b"}).status_code == 415
    assert client.get("/v1/nothing").status_code == 404
    assert client.get(TEXT).status_code == 405
    assert client.get("/docs").status_code == 404
    for path in ("/v1/nothing", TEXT):
        assert client.get(path).json()["error"]["type"] == "invalid_request_error"


def test_a_body_is_refused_as_soon_as_it_is_too_large(client: httpx.Client) -> None:
    refused = client.post(TEXT, json=prompt("x" * LIMITS.max_body))
    assert refused.status_code == 413
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 100 * LIMITS.max_body:
            sent += 1024
            yield b" " * 1024

    # chunked, so no header gives its length; the server may close the connection meanwhile
    headers = {"Content-Type": "application/json"}
    try:
        assert client.post(TEXT, content=endless(), headers=headers).status_code == 413
    except httpx.TransportError:
        assert sent < 100 * LIMITS.max_body


def test_a_body_that_does_not_arrive_in_time_is_refused() -> None:
    limits = dataclasses.replace(LIMITS, body_s=0.1)
    with (
        live(make_model_server(make_engine(limits=limits), limits)) as client,
        socket.create_connection((client.base_url.host, client.base_url.port)) as connection,
    ):
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_every_route_needs_the_key_and_without_one_the_host_must_be_loopback() -> None:
    key = "sixteen-letters-or-more"
    paths = ("/v1/models", "/health", "/metrics", "/nothing", TEXT, "/docs")
    with live(make_model_server(make_engine(), api_key=key)) as client:
        for given in (None, "Bearer", f"Bearer {key}x", f"Bear {key}", key, "Bearer \xe9"):
            headers = {} if given is None else {"Authorization": given.encode("latin-1")}
            for path in paths:
                answer = client.get(path, headers=headers)
                assert answer.status_code == 401, (path, given)
                assert key not in answer.text
        for scheme in ("Bearer", "bearer", "BEARER", "Bearer "):
            known = {"Authorization": f"{scheme} {key}", "Host": "example.org"}
            assert client.get("/v1/models", headers=known).status_code == 200, scheme
    with live(make_model_server(make_engine())) as client:
        for host in ("example.org", "127.0.0.1.example.org", "[", ""):
            assert client.get("/v1/models", headers={"Host": host}).status_code in (400, 403), host
        for host in ("localhost", "127.0.0.1:99", "[::1]:80", "LOCALHOST"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200, host


def test_health_generates_a_token_and_metrics_count_tokens_and_responses() -> None:
    engine = make_engine()
    with live(make_model_server(engine)) as client:
        assert client.get("/health").json()["status"] == "ok"
        found = client.post(TEXT, json=prompt(n=2)).json()
        client.get("/nowhere/at/all")
        lines = client.get("/metrics").text.splitlines()
    counts = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    written = found["usage"]["completion_tokens"] + 1  # the token of /health
    assert float(counts["longtail_generated_tokens_total"]) == written
    assert float(counts["longtail_prompt_tokens_total"]) == 2 * found["usage"]["prompt_tokens"]
    assert float(counts["longtail_first_token_seconds_count"]) == 2
    assert float(counts["longtail_completion_seconds_count"]) == 2
    assert float(counts['longtail_responses_total{route="other",status="404"}']) == 1
    assert float(counts["longtail_running_completions"]) == 0
    assert counts["longtail_kv_free_tokens"] == counts["longtail_kv_total_tokens"]


@pytest.mark.slow
def test_kv_counts_as_free_before_the_caller_has_its_response() -> None:
    with live(make_model_server(make_engine(SlowlyCountedEngine))) as client:
        for _ in range(3):
            assert client.post(TEXT, json=prompt(n=2)).status_code == 200
            lines = client.get("/metrics").text.splitlines()
            counts = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
            assert counts["longtail_kv_free_tokens"] == counts["longtail_kv_total_tokens"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_requests_and_health_fail_if_the_engine_cannot_be_made_again() -> None:
    with live(make_model_server(make_engine(FailingEngine))) as client:
        whole = client.post(CHAT, json=chat(max_tokens=50))
        assert whole.status_code == 503
        assert whole.json()["error"]["type"] == "server_error"
        for answer in (client.get("/health"), client.post(CHAT, json=chat(stream=True))):
            assert answer.status_code == 503
    with live(make_model_server(make_engine(FailingEngine))) as client:
        streamed = client.post(CHAT, json=chat(max_tokens=50, stream=True))
        *_, last = [line for line in streamed.text.split("\n\n") if line]
        assert "error" in json.loads(last.removeprefix("data: "))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stream_continues_where_it_was_when_the_engine_is_replaced() -> None:
    body = chat(max_tokens=60, stream=True)
    with live(make_model_server(make_engine())) as client:
        expected = events(client.post(CHAT, json=body))
    with live(make_model_server(make_engine(FailingEngine), then=[make_engine()])) as client:
        pieces = events(client.post(CHAT, json=body))
        assert client.get("/health").status_code == 200
        assert "longtail_engine_restarts_total 1.0" in client.get("/metrics").text

    def written(pieces: list[Any]) -> str:
        return "".join(piece["choices"][0]["delta"]["content"] for piece in pieces)

    assert written(pieces) == written(expected)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_that_fails_two_engines_is_answered_500_and_the_next_one_200() -> None:
    engines = [make_engine(PoisonedEngine) for _ in range(3)]
    with live(make_model_server(engines[0], then=engines[1:])) as client:
        failed = client.post(TEXT, json=prompt([PoisonedEngine.poison, 7]))
        assert failed.status_code == 500
        assert "failed twice" in failed.json()["error"]["message"]
        assert client.post(TEXT, json=prompt()).status_code == 200
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"top_p": 1e-46}, 200),
        ({"top_p": 5e-324, "top_k": 2**31 - 1, "min_p": 1e-300}, 200),
        ({"temperature": 1e-300}, 400),
        ({"stop": "\ud83d"}, 400),
        ({"prompt": "a\ud83d"}, 400),
        ({"\ud83d": 1}, 400),
        ({"model": "\ud83d"}, 400),
        ({"metadata": {"\ude00": []}}, 400),
    ],
    ids=ascii,
)
def test_no_request_ends_the_engine(
    client: httpx.Client, more: dict[str, Any], status: int
) -> None:
    """Regression: a tiny top_p, and half a surrogate pair, once left the server at 503."""
    body = json.dumps({**prompt(), **more})  # surrogates as JSON escapes
    answer = client.post(TEXT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert client.get("/health").status_code == 200


@pytest.mark.slow
def test_requests_beyond_the_queue_are_told_when_to_retry() -> None:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)
    gate = engine.hold()
    server = make_model_server(engine)
    with live(server) as client, live_streams(client, 2, n=4) as streams:
        refused = client.post(CHAT, json=chat())
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["type"] == "rate_limit_error"
        gate.set()
        for stream in streams:
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert client.post(CHAT, json=chat()).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_kv(stream: bool) -> None:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)
    gate = engine.hold()
    with live(make_model_server(engine)) as client:
        body = json.dumps(prompt(max_tokens=100, stream=stream)).encode()
        with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
            head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            start = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\n{head}"
            connection.sendall(start.encode() + body)
            until(lambda: engine.num_unfinished == 1)
        # it disconnects before the first token
        until(lambda: "longtail_running_completions 0.0" in client.get("/metrics").text)
        gate.set()
        until(lambda: is_free(engine))
        assert "longtail_aborted_completions_total 1.0" in client.get("/metrics").text


@pytest.mark.slow
def test_unfinished_requests_get_an_error_when_the_server_stops() -> None:
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)
    gate, server = engine.hold(), make_model_server(engine)
    with httpx.Client(timeout=30, trust_env=False) as client, ThreadPoolExecutor(1) as caller:
        with running(server, drain_s=0.2) as port:
            url = f"http://127.0.0.1:{port}{CHAT}"
            streamed = client.send(
                client.build_request("POST", url, json=chat(stream=True)), stream=True
            )
            whole = caller.submit(httpx.post, url, json=chat(), timeout=30, trust_env=False)
            until(lambda: server.service.num_running == 2)
            threading.Timer(0.5, gate.set).start()  # the held step returns at last
        *_, last = [line for line in streamed.read().decode().split("\n\n") if line]
        assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        streamed.close()
        assert whole.result().status_code == 503
    assert is_free(engine)


class live_streams:  # noqa: N801 - a context manager
    """Streams that are started here and read later."""

    def __init__(self, client: httpx.Client, count: int, **more: Any) -> None:
        self._client, self._bodies = client, [chat(stream=True, **more) for _ in range(count)]
        self._streams: list[httpx.Response] = []

    def __enter__(self) -> list[httpx.Response]:
        for body in self._bodies:
            request = self._client.build_request("POST", CHAT, json=body)
            self._streams.append(self._client.send(request, stream=True))
        return self._streams

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.close()
