"""Routes for RL trainers: token ids, pauses, and weights and drafters from directories."""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from longtail.drafter.draft_model import ModelDrafter
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.report import StepReport
from longtail.engine.speculation.speculator import Speculation
from longtail.model.hf.model import save_model
from longtail.model.transformer import Transformer
from longtail.speculation.strategy import Strategy
from support.serving import (
    LIMITS,
    NAME,
    FailingEngine,
    is_free,
    live,
    make_engine,
    make_model_server,
    shared_tokenizer,
)
from support.tiny_models import tiny_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOKEN = "a-token-of-enough-letters"


def prompt(text: Any = "3+4=", **more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": text, "max_tokens": 12, "seed": 5, **more}


def chat(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "3+4?"}]
    return {"model": NAME, "messages": messages, "max_tokens": 12, "seed": 5, **more}


def events(answer: httpx.Response) -> list[Any]:
    lines = [line for line in answer.text.split("\n\n") if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines if not line.endswith("DONE]")]


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def running(client: httpx.Client) -> int:
    found = client.get("/metrics").text.split("longtail_running_completions ")[-1]
    return int(float(found.split()[0]))


def text(client: httpx.Client, **more: Any) -> str:
    found = client.post(TEXT, json=prompt(**more)).raise_for_status()
    return found.json()["choices"][0]["text"]


def weights(path: Path, seed: int = 1, **shape: Any) -> Path:
    """Write the weights of another model, in float64."""
    save_model(tiny_model(seed=seed, dtype=torch.float64, **shape), path)
    return path


def engine_of(model: Transformer) -> RolloutEngine:
    limits = EngineLimits(
        max_running=LIMITS.max_running, max_step_tokens=64, max_len=LIMITS.max_len
    )
    return RolloutEngine(model, shared_tokenizer().decode, limits)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[httpx.Client]:
    with live(make_model_server(make_engine(), rl_dir=tmp_path)) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """Return a client of a server without trainers, whose drafter is the model itself."""
    speculation = Speculation.fixed(
        ModelDrafter(tiny_model(dtype=torch.float64)), Strategy(depth=4, size=4)
    )
    with live(make_model_server(make_engine(speculation=speculation))) as client:
        yield client


def test_token_ids_are_returned_whole_and_streamed(client: httpx.Client) -> None:
    tokenizer = shared_tokenizer()
    asked = prompt(["3+4=", "12"], n=2, return_token_ids=True, logprobs=0)
    choices = client.post(TEXT, json=asked).json()["choices"]
    for each, given in zip(choices, ("3+4=", "3+4=", "12", "12"), strict=True):
        assert each["prompt_token_ids"] == list(tokenizer.encode(given))
        assert tokenizer.decode(each["token_ids"]) == each["text"]
        assert len(each["token_ids"]) == len(each["logprobs"]["token_logprobs"])
    pieces = [p["choices"][0] for p in events(client.post(TEXT, json=asked | {"stream": True}))]
    for index, each in enumerate(choices):
        mine = [piece for piece in pieces if piece["index"] == index]
        assert joined(piece["token_ids"] for piece in mine) == each["token_ids"]
        shown = [piece["prompt_token_ids"] for piece in mine]
        assert shown == [each["prompt_token_ids"]] + [None] * (len(mine) - 1)
    whole = client.post(CHAT, json=chat(return_token_ids=True)).json()
    streamed = events(client.post(CHAT, json=chat(return_token_ids=True, stream=True)))
    assert streamed[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in piece for piece in streamed[1:])
    ids = joined(piece["choices"][0]["token_ids"] for piece in streamed)
    assert ids == whole["choices"][0]["token_ids"]


def test_tokens_are_named_by_their_ids_if_a_client_asks_for_it(client: httpx.Client) -> None:
    asked = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = client.post(TEXT, json=prompt(logprobs=0, **asked)).json()["choices"]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert [list(each) for each in choice["logprobs"]["top_logprobs"]] == [[n] for n in names]
    (choice,) = client.post(CHAT, json=chat(logprobs=True, **asked)).json()["choices"]
    rows = choice["logprobs"]["content"]
    assert [row["token"] for row in rows] == [f"token_id:{each}" for each in choice["token_ids"]]
    shown = bytes(joined(row["bytes"] for row in rows)).decode()
    assert shown == choice["message"]["content"]


def test_a_repetition_penalty_without_effect_is_accepted_and_others_are_refused(
    client: httpx.Client,
) -> None:
    plain = client.post(TEXT, json=prompt()).json()["choices"]
    assert client.post(TEXT, json=prompt(repetition_penalty=1.0)).json()["choices"] == plain
    answer = client.post(TEXT, json=prompt(repetition_penalty=1.1))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "repetition_penalty"


def test_openais_client_reads_token_ids_and_counts_of_drafted_tokens(client: httpx.Client) -> None:
    base = str(client.base_url).rstrip("/") + "/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as reader:
        found = reader.completions.create(
            model=NAME,
            prompt=[list(shared_tokenizer().encode("3+4="))],
            max_tokens=30,
            seed=1,
            logprobs=0,
            extra_body={"return_token_ids": True, "repetition_penalty": 1.0},
        )
    details, extra = found.usage.completion_tokens_details, found.longtail
    assert details.accepted_prediction_tokens == extra["accepted_tokens"] > 0
    assert details.rejected_prediction_tokens == extra["drafted_tokens"] - extra["accepted_tokens"]
    assert extra["policy_version"] == 0
    assert len(found.choices[0].token_ids) == found.usage.completion_tokens


def test_what_clients_of_trainers_ask_has_vllms_shapes(client: httpx.Client) -> None:
    assert client.get("/get_world_size").json() == {"world_size": 1}
    assert client.get("/is_paused").json() == {"is_paused": False}
    assert client.get("/weight_info").json() == {"weight_version": "0"}
    assert client.post("/reset_prefix_cache").json() == {"success": True}
    info = client.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert info["model_config"]["dtype"] == "torch.float64"
    assert info["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert info["lora_config"] is info["weight_transfer_config"] is None
    assert isinstance(client.get("/server_info").json()["vllm_config"], str)


def test_without_a_directory_for_trainers_nothing_can_be_changed(client: httpx.Client) -> None:
    for path in ("/pause", "/resume", "/update_weights", "/update_drafter"):
        answer = client.post(path, json={})
        assert answer.status_code == 404
        assert "--rl-dir" in answer.json()["error"]["message"]


def test_a_web_page_cannot_pause_the_server(served: httpx.Client) -> None:
    answer = served.post("/pause", headers={"Origin": "http://elsewhere.example"})
    assert answer.status_code == 415
    assert not served.get("/is_paused").json()["is_paused"]


def test_completions_wait_during_a_pause_and_continue_unchanged(served: httpx.Client) -> None:
    expected = text(served, max_tokens=60)
    with ThreadPoolExecutor(2) as callers:
        assert served.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
        calls = [callers.submit(text, served, max_tokens=60) for _ in range(2)]
        until(lambda: running(served) == 2)
        assert served.get("/health").status_code == 200
        assert not any(call.done() for call in calls)
        assert served.post("/resume").json() == {"status": "resumed"}
        assert [call.result() for call in calls] == [expected] * 2


def test_an_aborting_pause_ends_completions_where_they_are_and_refuses_others(
    served: httpx.Client,
) -> None:
    whole = text(served, max_tokens=100)
    served.post("/pause", params={"mode": "keep"})
    with ThreadPoolExecutor(1) as callers:
        call = callers.submit(served.post, TEXT, json=prompt(max_tokens=100, logprobs=0))
        until(lambda: running(served) == 1)
        assert served.post("/pause").status_code == 200
        (choice,) = call.result().json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert whole.startswith(choice["text"])
    assert len(choice["text"]) < len(whole)
    assert served.post(TEXT, json=prompt()).status_code == 503
    served.post("/resume")
    assert text(served, max_tokens=100) == whole
    assert served.post("/pause", params={"mode": "stop"}).json()["error"]["param"] == "mode"


def test_a_waiting_pause_begins_when_all_completions_are_finished(served: httpx.Client) -> None:
    expected = text(served, max_tokens=100)
    served.post("/pause", params={"mode": "keep"})
    with ThreadPoolExecutor(2) as callers:
        call = callers.submit(text, served, max_tokens=100)
        until(lambda: running(served) == 1)
        served.post("/resume")
        assert served.post("/pause", params={"mode": "wait"}).status_code == 200
        assert call.result() == expected
    assert served.get("/is_paused").json()["is_paused"]
    assert served.post(TEXT, json=prompt()).status_code == 503


@pytest.mark.slow
def test_new_weights_write_the_next_texts(served: httpx.Client, tmp_path: Path) -> None:
    before = text(served)
    file = weights(tmp_path / "step-1") / "model.safetensors"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    update = {"directory": "step-1", "version": 7, "sha256": {file.name: digest}}
    answer = served.post("/update_weights", json={"update_info": update}).json()
    assert answer == {"message": "Weights updated", "policy_version": 7}
    found = served.post(TEXT, json=prompt()).json()
    with live(make_model_server(engine_of(tiny_model(seed=1, dtype=torch.float64)))) as other:
        assert found["choices"][0]["text"] == text(other) != before
    assert found["longtail"]["policy_version"] == 7
    assert served.get("/weight_info").json() == {"weight_version": "7"}
    weights(tmp_path / "step-2", seed=0)
    served.post("/update_weights", json={"update_info": {"directory": "step-2"}})
    assert text(served) == before


class SteppedEngine(RolloutEngine):
    """An engine each of whose steps needs a permit."""

    permits = threading.Semaphore(0)

    def step(self) -> StepReport:
        assert self.permits.acquire(timeout=20)
        return super().step()


@pytest.mark.slow
def test_no_text_mixes_weights(tmp_path: Path) -> None:
    """Texts in progress begin anew; a stream that has shown a part ends with an error."""
    weights(tmp_path / "new")
    engine = make_engine(SteppedEngine)
    engine.permits = permits = threading.Semaphore(10)
    bodies = [prompt(max_tokens=100), prompt(max_tokens=100, stream=True)]
    with (
        live(make_model_server(engine, rl_dir=tmp_path)) as client,
        ThreadPoolExecutor(3) as callers,
    ):
        calls = [callers.submit(client.post, TEXT, json=body) for body in bodies]
        until(lambda: len(engine.unfinished()) == 2 and not permits._value)
        pause = callers.submit(client.post, "/pause", params={"mode": "keep"})
        while not pause.done():
            permits.release()
            time.sleep(0.01)
        client.post("/update_weights", json={"update_info": {"directory": "new"}})
        permits.release(1000)
        client.post("/resume")
        whole, streamed = (call.result() for call in calls)
        assert whole.json()["choices"][0]["text"] == text(client, max_tokens=100)
    assert whole.json()["longtail"]["policy_version"] == 1
    assert "the weights were changed" in events(streamed)[-1]["error"]["message"]


def test_weights_that_do_not_fit_are_refused_and_change_nothing(
    served: httpx.Client, tmp_path: Path
) -> None:
    before = text(served)
    save_model(tiny_model(hidden_size=16, dtype=torch.float64), tmp_path / "small")
    (weights(tmp_path / "other") / "config.json").write_text(
        (tmp_path / "small" / "config.json").read_text()
    )
    nan = weights(tmp_path / "nan") / "model.safetensors"
    tensors = load_file(nan)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, nan, metadata={"format": "pt"})
    cut = weights(tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-8])
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (tmp_path / "link").symlink_to("/")
    good = {"model.safetensors": "0" * 64}
    for info, message in (
        ({"directory": "small"}, "describes another model"),
        ({"directory": "other"}, "describes another model"),
        ({"directory": "nan"}, "model.norm.weight holds 1 values that are NaN"),
        ({"directory": "cut"}, "not a readable safetensors file"),
        ({"directory": "pickled"}, "is a pickle, which is never opened"),
        ({"directory": "nowhere"}, "no such directory in --rl-dir"),
        ({"directory": "../.."}, "only directories inside"),
        ({"directory": "/etc"}, "only directories inside"),
        ({"directory": "link/etc"}, "only directories inside"),
        ({"directory": "a\0b"}, "no"),
        ({"directory": "a" * 3000}, "no such directory in --rl-dir"),
        ({"directory": "nan", "sha256": good}, "its SHA-256 is"),
        ({"directory": "nan", "sha256": {}}, "sha256 lacks model.safetensors"),
        ({"directory": 3}, "update_info.directory = 3"),
        ({"names": []}, "update_info"),
    ):
        answer = served.post("/update_weights", json={"update_info": info})
        assert answer.status_code == 400, info
        assert message in answer.json()["error"]["message"]
    (tmp_path / "small" / "config.json").unlink()
    answer = served.post("/update_weights", json={"update_info": {"directory": "small"}})
    assert "has shape" in answer.json()["error"]["message"]
    assert text(served) == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_is_replaced_keeps_the_weights(tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.float64)
    failing, next_one = engine_of(model), engine_of(model)
    server = make_model_server(failing, then=[next_one], rl_dir=tmp_path)
    weights(tmp_path / "new")
    with live(server) as client:
        client.post("/update_weights", json={"update_info": {"directory": "new"}})
        expected = text(client)
        failing.__class__ = FailingEngine
        found = client.post(TEXT, json=prompt()).json()
        assert found["choices"][0]["text"] == expected
        assert found["longtail"]["policy_version"] == 1
    assert is_free(next_one)


@pytest.mark.slow
def test_a_drafter_is_exchanged_without_changing_a_text(
    served: httpx.Client, tmp_path: Path
) -> None:
    drafter = weights(tmp_path / "drafter", seed=0)
    shared_tokenizer().save(drafter)
    before = served.post(TEXT, json=prompt(max_tokens=60)).json()
    for names in ("drafter", "history+drafter", "history", "none"):
        answer = served.post("/update_drafter", json={"drafter": names})
        assert answer.json() == {"message": "Drafter updated", "drafter": names}
        found = served.post(TEXT, json=prompt(max_tokens=60)).json()
        assert found["choices"] == before["choices"]
    for names in ("nowhere", "../x", "fresh", "drafter+nowhere"):
        answer = served.post("/update_drafter", json={"drafter": names})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "drafter"


def test_with_an_admin_token_only_its_holder_changes_the_service(tmp_path: Path) -> None:
    key = "a-key-of-enough-letters"
    server = make_model_server(make_engine(), api_key=key, rl_dir=tmp_path, admin_token=TOKEN)
    bearer = {"Authorization": f"Bearer {key}"}
    with live(server, headers=bearer) as client:
        assert text(client)
        for path in ("/pause", "/resume", "/update_weights", "/update_drafter"):
            answer = client.post(path, json={})
            assert answer.status_code == 401
            assert "admin token" in answer.json()["error"]["message"]
        admin = {"Authorization": f"Bearer {TOKEN}"}
        assert client.post("/pause", headers=admin).status_code == 200
        assert client.post("/resume", headers=admin).status_code == 200
        assert client.get("/get_world_size", headers=admin).status_code == 401
