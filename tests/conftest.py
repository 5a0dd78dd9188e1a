"""Every test: one compute thread, no network, no accelerator unless asked for, no download."""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
if not os.environ["CUDA_VISIBLE_DEVICES"]:  # before Triton is imported, which some libraries do
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline"})

import hypothesis
import jaxtyping
import pytest
import torch

torch.set_num_threads(1)
# No test depends on a clock: these machines stall.
# The same examples wherever tests run; others, and more of them, with `make fuzz`.
hypothesis.settings.register_profile("longtail", deadline=None, derandomize=True)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("longtail")
# A job in a shell's background ignores SIGINT, one under nohup SIGHUP: tests send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

TESTS = Path(__file__).parent
_CONNECT = socket.socket.connect


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check the shapes and types of every call, except in whole runs that are not marked `shapes`.

    The checks take two thirds of a tiny engine step, and shapes do not depend on the schedule.
    """
    marks = {mark.name for mark in item.iter_markers()}
    is_whole = item.path.relative_to(TESTS).parts[0] in ("end_to_end", "laws")
    is_checked = "shapes" in marks if is_whole else "many_steps" not in marks
    jaxtyping.config.update("jaxtyping_disable", not is_checked)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny model with its tokenizer."""
    from support.tiny_models import save_tiny

    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a place to train in, which the tests of a file share."""
    from end_to_end.workshop import build

    return build(tmp_path_factory.mktemp("workshop"))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module that only this test can import; return its name."""

    def write(source, name):
        (tmp_path / f"{name}.py").write_text(source)
        return name

    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield write
    for name in set(sys.modules) - before:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections that would leave this machine."""

    def connect(self: socket.socket, address: object) -> None:
        inside = self.family == socket.AF_UNIX or (
            isinstance(address, tuple) and address[0] in ("127.0.0.1", "::1", "localhost")
        )
        if not inside:
            raise OSError(f"a test tried to reach {address}")
        _CONNECT(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
