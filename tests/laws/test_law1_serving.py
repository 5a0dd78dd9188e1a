"""Law 1 over HTTP: the same seed is answered with the same text with any drafter and in any form.

The reference is an engine of its own that decodes plainly and serves each request alone, with the
noise key that `longtail generate` uses for the seed. Float64, so the law is exact.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from longtail.cli import main as cli
from longtail.drafter.history import HistoryDrafter
from longtail.engine.speculation.speculator import Speculation
from longtail.sampling import completion_key
from longtail.speculation.drafter import Drafter
from longtail.speculation.strategy import Strategy
from support.drafters import ModelChains
from support.engine_requests import request_of
from support.serving import NAME, live, make_engine, make_model_server, shared_tokenizer
from support.tiny_models import tiny_model

CHAIN = Strategy(depth=4, size=4)
DRAFTERS: dict[str, Callable[[], Drafter] | None] = {
    "none": None,
    "perfect": lambda: ModelChains(tiny_model(dtype=torch.float64)),
    "history": HistoryDrafter,
}
ASKED: tuple[dict[str, Any], ...] = (
    {"prompt": "3+4=", "seed": 1, "max_tokens": 18},
    {"prompt": "3+4=", "seed": 2, "max_tokens": 16, "n": 3},
    {"prompt": ["abc", "x"], "seed": 1, "max_tokens": 12, "temperature": 0.7, "top_p": 0.9},
    {"prompt": "y" * 40, "seed": -3, "max_tokens": 30, "temperature": 0, "stop": ["a", "12"]},
    {"prompt": "z", "seed": 2**62, "max_tokens": 20, "top_k": 9, "min_p": 0.01},
)


def reference(asked: dict[str, Any]) -> list[str]:
    """Return the text of each choice by the definition."""
    tokenizer, engine = shared_tokenizer(), make_engine()
    sampling = {name: asked[name] for name in asked.keys() - {"prompt", "seed", "n"}}
    sampling |= {"stop": tuple(asked.get("stop", ())), "stop_token_ids": tokenizer.eos_ids}
    prompts = asked["prompt"] if isinstance(asked["prompt"], list) else [asked["prompt"]]
    texts = []
    for prompt in prompts:
        for index in range(asked.get("n", 1)):
            key = completion_key(asked["seed"], index)
            request = request_of("alone", tokenizer.encode(prompt), key, **sampling)
            texts += [done.text for done in engine.generate([request])]
    return texts


@pytest.fixture(scope="module")
def expected() -> list[list[str]]:
    return [reference(asked) for asked in ASKED]


def whole(client: httpx.Client, asked: dict[str, Any]) -> list[str]:
    found = client.post("/v1/completions", json={"model": NAME, **asked}).raise_for_status()
    return [choice["text"] for choice in found.json()["choices"]]


def streamed(client: httpx.Client, asked: dict[str, Any]) -> list[str]:
    body = {"model": NAME, "stream": True, **asked}
    texts: dict[int, str] = {}
    for line in client.post("/v1/completions", json=body).text.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in sorted(texts)]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_same_seed_is_the_same_text_drafted_alone_among_others_streamed_or_not(
    drafter, expected
):
    make = DRAFTERS[drafter]
    speculation = None if make is None else Speculation.fixed(make(), CHAIN)
    with live(make_model_server(make_engine(speculation=speculation))) as client:
        for asked, texts in zip(ASKED, expected, strict=True):
            assert whole(client, asked) == texts
            assert streamed(client, asked) == texts
        with ThreadPoolExecutor(2) as callers:
            for ask in (whole, streamed):
                answers = callers.map(lambda asked, ask=ask: ask(client, asked), ASKED)
                assert list(answers) == expected
        body = {"model": NAME, **ASKED[0]}
        accepted = client.post("/v1/completions", json=body).json()["longtail"]
    if drafter == "perfect":
        assert accepted["accept_length"] > 3
    if drafter == "none":
        assert accepted["accept_length"] is None


@pytest.mark.slow
def test_generate_writes_the_text_that_a_server_answers(model_path, capsys):
    words = ["--prompt=3+4=", "--seed=7", "--max-tokens=50", "--n=2", "--json", "--raw"]
    assert cli.main(["generate", str(model_path), "--dtype=float64", "--threads=1", *words]) == 0
    written = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    with live(make_model_server(make_engine())) as client:
        asked = {"prompt": "3+4=", "seed": 7, "max_tokens": 50, "n": 2}
        assert whole(client, asked) == written
