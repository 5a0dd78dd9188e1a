"""The routes over real HTTP: responses, streams, refusals and metrics."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest

from longtail.assembly.drafters import Target, open_speculation
from longtail.drafter.formats.checkpoint import TENSORS
from longtail.drafter.history import HistoryDrafter
from longtail.engine.engine import RolloutEngine
from longtail.engine.speculation.speculator import Speculation
from longtail.serve import server
from longtail.speculation.strategy import Strategy
from longtail.system import tensor_files
from support.published import our_drafter
from support.run_processes import wait_until
from support.serving import (
    NAME,
    OPTIONS,
    FailingEngine,
    HeldEngine,
    is_free,
    live,
    make_engine,
    make_model_server,
    shared_tokenizer,
)
from support.tiny_models import tiny_tokenizer

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


def test_a_response_has_openais_format_and_counts_its_tokens(client):
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


def test_a_drawn_seed_is_reported_and_reproduces_the_text(client):
    first = client.post(TEXT, json=prompt(seed=None)).json()
    other = client.post(TEXT, json=prompt(seed=None)).json()
    again = client.post(TEXT, json=prompt(seed=first["longtail"]["seed"])).json()
    assert first["longtail"]["seed"] != other["longtail"]["seed"]
    assert first["choices"] == again["choices"]


def test_events_are_lines_for_every_client():
    """Some clients end a line at U+0085, U+2028 and U+2029, too."""
    event = server._event({"text": "a\u2028b\u0085c\u2029d\r\x00\u65e5"})
    assert event.endswith("\n\n")
    assert event.splitlines() == [event.removesuffix("\n\n"), ""]
    assert json.loads(event.removeprefix("data: "))["text"] == "a\u2028b\u0085c\u2029d\r\x00\u65e5"


def test_a_text_begins_with_bos_unless_the_caller_says_no():
    routes = replace(make_model_server(make_engine()), tokenizer=tiny_tokenizer(adds_special=True))
    with live(routes) as client:
        asked = prompt(return_token_ids=True)
        told = [
            client.post(TEXT, json=asked | more).json()["choices"][0]["prompt_token_ids"]
            for more in ({}, {"add_special_tokens": False}, {"prompt": "<pad>3+4="})
        ]
    plain = list(shared_tokenizer().encode("3+4="))
    assert told == [[0, *plain], plain, [0, *plain]]


def test_logprobs_cover_every_token_streamed_or_not(client):
    whole = client.post(CHAT, json=chat(logprobs=True)).json()
    (choice,) = whole["choices"]
    rows = choice["logprobs"]["content"]
    assert len(rows) == whole["usage"]["completion_tokens"]
    written = [row["token"] for row in rows if not row["token"].startswith("token_id:")]
    assert "".join(written) == choice["message"]["content"]
    assert all(row["logprob"] < 0 and row["top_logprobs"] == [] for row in rows)
    assert b"".join(bytes(row["bytes"]) for row in rows).decode() == choice["message"]["content"]
    pieces = events(client.post(CHAT, json=chat(logprobs=True, stream=True)))
    assert [r for p in pieces for r in p["choices"][0]["logprobs"]["content"]] == rows
    (columns,) = client.post(TEXT, json=prompt(logprobs=0)).json()["choices"]
    listed = columns["logprobs"]
    named = [name for name in listed["tokens"] if not name.startswith("token_id:")]
    assert "".join(named) == columns["text"]
    assert len(listed["tokens"]) == len(listed["token_logprobs"])


def test_token_ids_of_prompts_and_texts_are_told_and_answered_as_texts(client):
    asked = {"return_token_ids": True, "return_tokens_as_token_ids": True, "n": 2}
    text = client.post(TEXT, json=prompt(logprobs=0, **asked)).json()
    ids = list(shared_tokenizer().encode("3+4="))
    for choice in text["choices"]:
        assert choice["prompt_token_ids"] == ids
        names = [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == names
        assert shared_tokenizer().decode(choice["token_ids"]) == choice["text"]
    by_ids = client.post(TEXT, json=prompt([ids], logprobs=0, **asked)).json()
    assert by_ids["choices"] == text["choices"]
    told = client.post(CHAT, json=chat(logprobs=True, **asked)).json()
    messages = chat()["messages"]
    assert told["prompt_token_ids"] == list(shared_tokenizer().chat(messages))
    streamed = events(client.post(CHAT, json=chat(logprobs=True, stream=True, **asked)))
    assert [each.get("prompt_token_ids") for each in streamed].count(None) == len(streamed) - 1
    for choice in told["choices"]:
        parts = [c for s in streamed for c in s["choices"] if c["index"] == choice["index"]]
        assert [t for part in parts for t in part["token_ids"]] == choice["token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (TEXT, prompt("x" * 128), 400, "over the engine's 128"),
        (TEXT, prompt("x" * 100, max_tokens=29), 400, "over the engine's 128"),
        (TEXT, prompt([1, 999]), 400, "holds token 999"),
        (TEXT, prompt(stop_token_ids=[999]), 400, "stops at token 999"),
        (CHAT, chat(stop="a<eos>"), 400, "give the token alone"),
        (TEXT, prompt(["a", "b"], n=5), 429, "asks for 10 more"),
        (CHAT, chat(n=10**12), 429, f"asks for {10**12} more"),
        (CHAT, chat(temperature=1e-30), 400, "temperature = 1e-30: it must be 0"),
    ],
)
def test_calls_beyond_the_limits_are_refused(client, path, body, status, said):
    answer = client.post(path, json=body)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), [(TEXT, prompt()), (CHAT, chat())])
def test_a_text_ends_at_a_stop_token_of_the_caller(client, path, body):
    whole = client.post(path, json={**body, "return_token_ids": True}).json()["choices"][0]
    token = whole["token_ids"][3]
    asked = {**body, "stop_token_ids": [token], "return_token_ids": True}
    found = client.post(path, json=asked).json()["choices"][0]
    place = whole["token_ids"].index(token)
    assert found["token_ids"] == whole["token_ids"][: place + 1]
    assert found["finish_reason"] == "stop"


def test_a_chat_without_max_tokens_may_fill_the_context(client):
    found = client.post(CHAT, json=chat("x" * 90, max_tokens=None)).json()
    reason, total = found["choices"][0]["finish_reason"], found["usage"]["total_tokens"]
    assert reason == "stop" or total == OPTIONS.max_len


def test_unknown_routes_and_methods_get_openais_error_body(client):
    for path, status in (("/v1/nothing", 404), (TEXT, 405), ("/docs", 404)):
        answer = client.get(path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_is_refused_as_soon_as_it_is_too_large(client, monkeypatch):
    monkeypatch.setattr(server, "_MAX_BODY", 4096)
    sent = 0

    def endless() -> Iterator[bytes]:  # chunked, so no header gives its length
        nonlocal sent
        while sent < 2**20:
            sent += 1024
            yield b" " * 1024

    try:  # the server may close the connection meanwhile
        assert client.post(TEXT, content=endless()).status_code == 413
    except httpx.TransportError:
        assert sent < 2**20
    assert client.post(TEXT, content=b" " * 4097).status_code == 413


@pytest.mark.parametrize("first", ["GET /health", f"POST {TEXT}", "GET /nothing"])
def test_a_body_with_two_lengths_ends_its_connection(client, first):
    with connected(client, first, b"0\r\n\r\n", "Transfer-Encoding: chunked") as connection:
        connection.settimeout(20)
        with connection.makefile("rb") as answer:
            assert answer.read().startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 404 "))


def test_prompts_beyond_the_queue_are_refused_before_they_are_tokenized(client, monkeypatch):
    monkeypatch.setattr(type(shared_tokenizer()), "encode", None)
    answer = client.post(TEXT, json=prompt(["a"] * 250_000))
    assert (answer.status_code, answer.json()["error"]["param"]) == (429, None)


def test_every_route_needs_the_key():
    key = "sixteen-letters-or-more"
    paths = ("/v1/models", "/health", "/metrics", "/v1/models/a")
    with live(make_model_server(make_engine(), api_key=key)) as client:
        for given in (None, "Bearer", f"Bearer {key}x", f"Bear {key}", key, "Bearer \xe9"):
            headers = {} if given is None else {"Authorization": given.encode("latin-1")}
            for answer in (
                client.post(CHAT, headers=headers, json=chat()),
                *(client.get(path, headers=headers) for path in paths),
            ):
                assert answer.status_code == 401, given
                assert key not in answer.text
        for scheme in ("Bearer", "bearer", "BEARER", "Bearer "):
            known = {"Authorization": f"{scheme} {key}", "Host": "example.org"}
            assert client.get("/v1/models", headers=known).status_code == 200, scheme


def test_without_a_key_host_and_origin_must_be_this_machine(client):
    for host in ("example.org", "127.0.0.1.example.org", "[", ""):
        assert client.get("/v1/models", headers={"Host": host}).status_code in (400, 403), host
    for host in ("localhost", "127.0.0.1:99", "[::1]:80", "LOCALHOST"):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200, host
    for origin, status in (("https://example.org", 403), ("null", 403), ("http://[::1]:9", 200)):
        assert client.post(CHAT, json=chat(), headers={"Origin": origin}).status_code == status


def counts(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_metrics_count_tokens_and_all_kv_is_free_once_the_caller_has_its_response():
    with live(make_model_server(make_engine())) as client:
        assert client.get("/health").json() == {"status": "ok"}
        usage = client.post(TEXT, json=prompt(n=2)).json()["usage"]
        found = counts(client)
    assert found["longtail_generated_tokens_total"] == usage["completion_tokens"]
    assert found["longtail_prompt_tokens_total"] == 2 * usage["prompt_tokens"]
    assert found["longtail_first_token_seconds_count"] == 1
    assert found["longtail_completion_seconds_count"] == 2
    assert found["longtail_running_completions"] == 0
    assert found["longtail_kv_free_tokens"] == found["longtail_kv_total_tokens"]


def test_a_drafter_is_exchanged_while_texts_are_generated_and_changes_none():
    def history() -> Speculation:
        return Speculation.fixed(HistoryDrafter(), Strategy(depth=4, size=4))

    with live(make_model_server(make_engine(), open_drafters=history)) as client:
        body = prompt(max_tokens=100, temperature=0)
        plain = client.post(TEXT, json=body).json()
        with ThreadPoolExecutor(1) as caller:
            meanwhile = caller.submit(client.post, TEXT, json=body)
            assert client.post("/reload_drafter").json() == {"drafter": "auto"}
            assert meanwhile.result().json()["choices"] == plain["choices"]
        drafted = client.post(TEXT, json=body).json()
    assert plain["longtail"]["drafted_tokens"] == 0
    assert drafted["longtail"]["drafted_tokens"] > 0
    assert drafted["choices"] == plain["choices"]


def test_a_drafter_that_no_kernel_may_read_is_answered_with_400(tmp_path):
    engine, tokenizer, path = make_engine(), shared_tokenizer(), tmp_path / "d"
    our_drafter(engine.model, tokenizer, reduced=True, layers=(0, 1)).save(path)
    tensors = tensor_files.read(path / TENSORS)
    tensor_files.save(tensors | {"draft_ids": tensors["draft_ids"].int()}, path / TENSORS)
    target = Target(model=engine.model, tokenizer=tokenizer, directory=path, name="here")
    read = partial(open_speculation, [str(path)], target)
    with live(make_model_server(engine, open_drafters=read)) as client:
        answer = client.post("/reload_drafter")
        assert answer.status_code == 400
        assert f"{path / TENSORS}: draft_ids is int32" in answer.json()["error"]["message"]
        assert client.post(TEXT, json=prompt()).status_code == 200


def test_requests_and_health_fail_once_the_engine_has_failed():
    with live(make_model_server(make_engine(FailingEngine))) as client:
        streamed = client.post(CHAT, json=chat(max_tokens=50, stream=True))
        *_, last = [line for line in streamed.text.split("\n\n") if line]
        assert "error" in json.loads(last.removeprefix("data: "))
        for answer in (client.get("/health"), client.post(CHAT, json=chat(stream=True))):
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "server_error"
            assert "the engine failed" in answer.json()["error"]["message"]


def connected(client: httpx.Client, first: str, body: bytes, *headers: str) -> socket.socket:
    """Send a request by hand and return its connection."""
    connection = socket.create_connection((client.base_url.host, client.base_url.port))
    lines = [f"{first} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    connection.sendall("\r\n".join([*lines, "\r\n"]).encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_place_at_once_and_its_kv(stream):
    """One that was not streamed used to keep its place until its first token."""
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)
    gate = engine.hold()
    with live(make_model_server(engine)) as client:
        body = json.dumps(prompt(max_tokens=100, stream=stream)).encode()
        with connected(client, f"POST {TEXT}", body):
            wait_until(lambda: engine.num_unfinished == 1)
        wait_until(lambda: counts(client)["longtail_running_completions"] == 0)
        gate.set()  # it has disconnected before the first token
        aborted = 'longtail_finished_completions_total{reason="abort"}'
        wait_until(lambda: counts(client).get(aborted) == 1)
        wait_until(lambda: is_free(engine))


@pytest.mark.slow
def test_unfinished_requests_get_an_error_when_the_server_stops():
    engine = make_engine(HeldEngine)
    assert isinstance(engine, HeldEngine)
    gate, server = engine.hold(), make_model_server(engine, replace(OPTIONS, drain_s=0.2))
    with ThreadPoolExecutor(2) as callers:
        with live(server) as client:
            url = f"{client.base_url}{CHAT}"
            asked = [
                callers.submit(httpx.post, url, json=chat(stream=stream), trust_env=False)
                for stream in (False, True)
            ]
            wait_until(lambda: server.service.num_running == 2)
            threading.Timer(0.5, gate.set).start()  # the held step returns at last
        whole, streamed = (each.result() for each in asked)
    assert whole.status_code == 503
    assert "shutting down" in streamed.text
    assert is_free(engine)
