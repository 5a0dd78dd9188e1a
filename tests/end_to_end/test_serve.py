"""`longtail serve` as a process: OpenAI's own client asks, signals end it."""

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import openai
import pytest

from end_to_end.processes import finish, start, wait_until
from longtail.cli import main as cli
from longtail.config.command_options import API_KEY

KEY = "a-key-of-enough-letters"
LISTENING = re.compile(r"serving (\S+) at (http://\S+/v1)")


@contextmanager
def serving(model: Path, log: Path, *words: str) -> Iterator[tuple[BaseProcess, str]]:
    """Start the command on a free port; hand in the process and its address."""
    log.touch()
    process = start(["serve", str(model), "--port=0", "--threads=1", *words], log)
    try:
        assert wait_until(lambda: bool(LISTENING.search(log.read_text())), process), log.read_text()
        found = LISTENING.search(log.read_text())
        assert found is not None
        assert found[1] == model.name
        yield process, found[2]
    finally:
        if process.is_alive():
            process.kill()
        process.join()


@pytest.mark.slow
def test_openais_client_reads_texts_streams_and_errors_and_a_signal_lets_them_finish(
    model_path, tmp_path
):
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")
    log, name = tmp_path / "log", model_path.name
    words = (f"--api-key-file={key_file}", "--drafter=history")
    with serving(model_path, log, *words) as (process, url):

        async def ask() -> None:
            async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
                assert [each.id async for each in client.models.list()] == [name]
                messages = [{"role": "user", "content": "hi"}]
                text = await client.completions.create(
                    model=name, prompt="hi", seed=1, max_tokens=20, logprobs=0
                )
                assert len(text.choices[0].logprobs.tokens) == text.usage.completion_tokens
                chat = dict(model=name, messages=messages, seed=1, max_tokens=30)
                answer = await client.chat.completions.create(**chat, n=2, logprobs=True)
                stream = await client.chat.completions.create(
                    **chat, stream=True, stream_options={"include_usage": True}
                )
                chunks = [chunk async for chunk in stream]
                joined = "".join(c.choices[0].delta.content for c in chunks if c.choices)
                assert joined == answer.choices[0].message.content
                assert chunks[-1].usage.completion_tokens <= 30
                said = answer.choices[0].message
                messages += [said.model_dump(), {"role": "user", "content": "and?"}]
                assert (await client.chat.completions.create(**chat)).choices
                with pytest.raises(openai.NotFoundError, match="does not exist here"):
                    await client.completions.create(model="gpt", prompt="x")
                with pytest.raises(openai.BadRequestError) as refused:
                    await client.chat.completions.create(**chat, presence_penalty=1)
                assert refused.value.param == "presence_penalty"
                with pytest.raises(openai.AuthenticationError):
                    await client.with_options(api_key="wrong").models.list()
                streaming = await client.completions.create(
                    model=name, prompt="hi", seed=9, max_tokens=400, stream=True
                )
                await anext(aiter(streaming))
                os.kill(process.pid, signal.SIGTERM)
                *_, last = [chunk async for chunk in streaming if chunk.choices]
                assert last.choices[0].finish_reason in ("stop", "length")  # it is finished

        asyncio.run(ask())
        assert finish(process) == 0, log.read_text()
    assert log.read_text().splitlines()[-1] == "stopped"
    assert KEY not in log.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "an API key is needed"),
        (["--host", "example.org"], "an API key is needed"),
        (["--port", "70000"], "--port = 70000"),
        (["--drain-s", "-1"], "--drain-s = -1: it must be"),
        (["--name", "a\udcff"], "--name = 'a\\udcff': give a name that can be printed"),
        (["--max-running", "0"], "--max-running = 0: it must be"),
        (["--kv-tokens", "100"], "--kv-tokens = 100: it cannot hold one request"),
        (["--api-key-file", "nowhere"], "--api-key-file = 'nowhere' cannot be read"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_loaded(capsys, monkeypatch, words, message):
    monkeypatch.delenv(API_KEY, raising=False)
    assert cli.main(["serve", "nowhere", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_weak_key_is_refused_and_not_shown(capsys, monkeypatch):
    for weak in ("", "short", "with a blank in it", "sixteen-letters-\xe9"):
        monkeypatch.setenv(API_KEY, weak)
        assert cli.main(["serve", "nowhere"]) == 2
        err = capsys.readouterr().err
        assert "an API key has at least 16" in err
        assert not weak or weak not in err


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "nowhere", "--port", str(port)]) == 2
    assert f"--port = {port}: cannot be bound" in capsys.readouterr().err


def test_without_the_extra_the_command_that_installs_it_is_told(capsys, monkeypatch):
    importers = ("longtail.serve.server", "longtail.system.http_server")
    for name in [n for n in sys.modules if n.startswith(("uvicorn", *importers))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in importers:
        monkeypatch.delattr(name, raising=False)
    assert cli.main(["serve", "nowhere"]) == 2
    assert "pip install" in capsys.readouterr().err
