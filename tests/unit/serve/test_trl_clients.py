"""Clients of TRL against the server: its rollout worker for AsyncGRPO and its HTTP clients."""

import copy
import importlib
import inspect
import queue
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from longtail.integrations.directory_transfer import DirectoryTransfer
from longtail.model.hf.model import save_model
from support.serving import NAME, live, make_engine, make_model_server, shared_tokenizer
from support.tiny_models import tiny_model

pytestmark = pytest.mark.slow
pytest.importorskip("trl")
pytest.importorskip("aiohttp")


def trl_module(name: str) -> ModuleType:
    """Import a module of TRL; experimental ones warn, and so do some of its dependencies."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        return importlib.import_module(f"trl.{name}")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def url(directory: Path) -> Iterator[str]:
    with live(make_model_server(make_engine(), rl_dir=directory)) as client:
        yield str(client.base_url).rstrip("/")


@pytest.fixture
def client(url: str) -> Any:
    """Return the client of AsyncGRPO's trainer."""
    from accelerate import PartialState

    PartialState()  # accelerate's logger needs it
    return trl_module("experimental.async_grpo.vllm_client").VLLMClient(url)


def test_the_trainers_client_reads_the_server_and_updates_its_weights(
    client: Any, url: str, directory: Path
) -> None:
    client.wait_for_server_ready()
    assert client.get_max_model_len() == 128
    assert client.get_dtype() == "torch.float64"
    assert client.get_world_size() == 1
    info = client.get_server_info()
    assert info["lora_config"] is None
    assert info["parallel_config"]["data_parallel_size"] == 1
    save_model(tiny_model(seed=2, dtype=torch.float64), directory / "step-1")
    client.init_weight_transfer_engine({"backend": "directory"})
    client.pause()
    client.start_weight_update()
    client.update_weights({"directory": "step-1"})
    client.finish_weight_update()
    client.resume()
    with pytest.raises(Exception, match="opens no NCCL group"):
        client.init_weight_transfer_engine({"master_address": "127.0.0.1", "master_port": 1})


def test_the_servers_client_generates_from_token_ids_and_messages(url: str) -> None:
    import requests

    module = trl_module("generation.vllm_client")
    client = object.__new__(module.VLLMClient)  # its constructor needs vLLM
    client.session, client.base_url, client.model = requests.Session(), url, NAME
    prompts = [list(shared_tokenizer().encode(text)) for text in ("3+4=", "12")]
    with client.session:
        found = client.generate(prompts, n=2, max_tokens=9, generation_kwargs={"seed": 4})
        told = client.chat([[{"role": "user", "content": "3"}]] * 2, n=2, max_tokens=9)
        client.reset_prefix_cache()
    assert found["prompt_ids"] == prompts
    for answer, count in ((found, 4), (told, 4)):
        assert len(answer["completion_ids"]) == count
        for ids, logprobs, named in zip(
            answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"], strict=True
        ):
            assert named == [[token] for token in ids]
            assert all(logprob < 0 for (logprob,) in logprobs)


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(each[-1]["content"])) for each in completions]


def test_the_rollout_worker_of_async_grpo_makes_samples(url: str) -> None:
    """Its loop runs in a thread here; TRL runs it in a process, which needs vLLM to start."""
    from accelerate import PartialState
    from datasets import Dataset

    PartialState()
    worker = trl_module("experimental.async_grpo.async_rollout_worker")
    templates = trl_module("chat_template_utils")
    tokenizer = copy.deepcopy(shared_tokenizer()._inner)
    tokenizer.chat_template = templates.qwen3_chat_template
    samples: queue.Queue[Any] = queue.Queue()
    loop = worker._AsyncRolloutLoop(
        model_name=NAME,
        dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "3"}]}] * 2),
        reward_funcs=[reward],
        processing_class=tokenizer,
        eos_token_ids=list(shared_tokenizer().eos_ids),
        rollout_buffer=samples,
        model_version_value=SimpleNamespace(value=3),
        heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=threading.Event(),
        exception_info_queue=queue.Queue(),
        metrics_queue=queue.Queue(),
        num_generations=2,
        max_inflight_tasks=4,
        vllm_server_url=url,
        max_tokens=10,
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        made = [samples.get(timeout=30) for _ in range(4)]
    finally:
        loop._loop.call_soon_threadsafe(loop._stop_event.set)
        thread.join()
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3"}], add_generation_prompt=True, return_dict=False
    )
    for sample in made:
        trained = sample.completion_mask == 1
        assert sample.model_version == 3
        assert 1 <= trained.sum() <= 10
        assert np.all(sample.old_log_probs[trained] < 0)
        assert sample.input_ids[~trained].tolist() == asked


def test_the_transfer_through_a_directory_has_every_method_of_trls_protocol() -> None:
    trainer = trl_module("experimental.async_grpo.async_grpo_trainer")
    methods = [name for name in vars(trainer.WeightTransferProtocol) if not name.startswith("_")]
    assert len(methods) == 5
    for name in methods:
        expected = inspect.signature(getattr(trainer.WeightTransferProtocol, name))
        assert list(inspect.signature(getattr(DirectoryTransfer, name)).parameters) == list(
            expected.parameters
        )
