"""vLLM sleeps while the learner works, and wakes for what needs it."""

from types import SimpleNamespace
from typing import Any

import pytest

from longtail.vllm.generator import VllmGenerator
from support.engine_requests import request_of


class Engine:
    """What VllmGenerator asks of vLLM's engine here; it does nothing while it sleeps."""

    def __init__(self, may_sleep: bool) -> None:
        self.model_config = SimpleNamespace(enable_sleep_mode=may_sleep)
        self.calls: list[str] = []
        self.asleep = False
        self.queue = ["a step that was scheduled ahead"]
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=self.queue))

    def step(self) -> list[Any]:
        assert not self.asleep
        self.queue.pop()
        return []

    def is_sleeping(self) -> bool:
        return self.asleep

    def sleep(self, level: int) -> None:
        self.asleep = True
        self.calls.append(f"sleep {level}")

    def wake_up(self) -> None:
        self.asleep = False
        self.calls.append("wake")

    def add_request(self, name: str, *_: Any) -> str:
        assert not self.asleep
        self.calls.append(f"add {name}")
        return name

    def collective_rpc(self, *_: Any, **__: Any) -> None:
        assert not self.asleep
        self.calls.append("load")

    def reset_prefix_cache(self) -> None:
        assert not self.asleep


def generator(may_sleep: bool) -> tuple[VllmGenerator, Engine]:
    made, engine = VllmGenerator.__new__(VllmGenerator), Engine(may_sleep)
    super(VllmGenerator, made).__init__()
    made._engine, made._names, made._vocab_size = engine, {}, 100
    made._limits = SimpleNamespace(max_len=50)
    return made, engine


REQUEST = request_of("a", (1, 2), max_tokens=4)


@pytest.mark.parametrize("may_sleep", [True, False])
def test_it_sleeps_once_when_idle_and_wakes_for_weights_and_requests(monkeypatch, may_sleep):
    monkeypatch.setattr("longtail.vllm.generator._params", lambda *_: None)
    made, engine = generator(may_sleep)
    made.sleep()
    made.sleep()
    made.load_policy(1, [])
    made.sleep()
    made.submit(REQUEST)
    made.sleep()  # a request runs
    if may_sleep:
        assert engine.calls == ["sleep 1", "wake", "load", "sleep 1", "wake", "add a"]
    else:
        assert engine.calls == ["load", "add a"]
