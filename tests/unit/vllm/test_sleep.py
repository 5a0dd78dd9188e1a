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
        self.queue = ["a step that was scheduled ahead"]
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=self.queue))

    def is_sleeping(self) -> bool:
        return "sleep" in self.calls[-1:]

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> str:
            assert name == "wake_up" or not self.is_sleeping()
            self.calls.append(name)
            self.queue.clear()
            return name

        return call


@pytest.mark.parametrize("may_sleep", [True, False])
def test_it_sleeps_once_when_idle_and_wakes_for_weights_and_requests(monkeypatch, may_sleep):
    monkeypatch.setattr("longtail.vllm.generator._params", lambda *_: None)
    made, engine = VllmGenerator.__new__(VllmGenerator), Engine(may_sleep)
    super(VllmGenerator, made).__init__()
    made._engine, made._names, made._vocab_size = engine, {}, 100
    made._limits = SimpleNamespace(max_len=50)
    made.sleep()
    made.sleep()
    made.load_policy(1, [])
    made.sleep()
    made.submit(request_of("a", (1, 2), max_tokens=4))
    made.sleep()  # a request runs
    loads = ["collective_rpc", "reset_prefix_cache"]
    if may_sleep:
        slept = ["sleep", "wake_up"]
        assert engine.calls == ["step", *slept, *loads, *slept, "add_request"]
    else:
        assert engine.calls == ["step", *loads, "add_request"]
