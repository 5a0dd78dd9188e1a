"""The step of the learned drafter as a GPU runs it: one graph, no wait, sums on another stream."""

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch.utils._python_dispatch import TorchDispatchMode

from longtail.drafter.weights import DRAFT_IDS
from longtail.vllm.history import SequenceTable, sent
from longtail.vllm.learned import Learned, Step
from longtail.vllm.learned_v1 import LearnedProposer
from longtail.vllm.learned_v2 import LearnedSpeculator
from longtail.vllm.ridge import Block, Parts

HIDDEN, VOCAB, DEPTH, RUNNING, LENGTH = 16, 128, 4, 8, 96
NAMES = [str(each) for each in range(RUNNING)]
CPU, META = torch.device("cpu"), torch.device("meta")


def learner(at: torch.device = CPU) -> Learned:
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), device=at)
    embedding, head = normal(2, VOCAB, HIDDEN)
    parts = Parts(
        embed=embedding.__getitem__, head=SimpleNamespace(weight=head), scale=1.0, soft_cap=None,
        hidden_size=HIDDEN, vocab_size=VOCAB, device=at, dtype=torch.float32,
    )  # fmt: skip
    block, ids = Block(parts, DEPTH, RUNNING), torch.arange(0, VOCAB, 2)
    maps = {f"streams.{slot}.weight": normal(HIDDEN, 2 * HIDDEN) for slot in range(DEPTH)}
    moves = {f"transitions.{slot}.weight": normal(HIDDEN, HIDDEN) for slot in range(DEPTH - 1)}
    block.take({**maps, **moves, DRAFT_IDS: ids})
    return Learned(block, SequenceTable(RUNNING, LENGTH, at), LearnedProposer().draw)


def play(learned: Learned) -> list[torch.Tensor]:
    """Take steps of eight requests and of five, whose tokens repeat; return the drafts."""
    at = learned.block.parts.device
    options = {"generator": torch.Generator().manual_seed(1), "device": at}
    rows, found, lengths = DEPTH + 1, [], [10] * RUNNING
    for name in NAMES:
        learned.sequences.begin(name, torch.randint(5, (10,), **options), 10)
    for count in (8, 5, 8, 8):
        kept = [1 + (3 * row + count) % rows for row in range(count)]
        positions = [length - 1 + row for length in lengths[:count] for row in range(rows)]
        drawn, tokens = sent(kept, at), torch.randint(5, (count * (rows + 1),), **options)
        states, index = torch.randn(count * rows, HIDDEN, **options), torch.arange(count, device=at)
        step = Step(
            states, tokens[count:], sent(positions, at), torch.arange(count + 1, device=at) * rows,
            num_sampled=drawn, num_rejected=rows - drawn, places=index, newest=tokens[:count],
            temperature=torch.ones(count, device=at), seeds=index,
        )  # fmt: skip
        lengths[:count] = [length + new for length, new in zip(lengths, kept, strict=False)]
        given = learned.sequences.given(NAMES[:count], [10] * count, lengths[:count])
        found.append(learned.step(step, given, DEPTH))
    return found


def kernels() -> int:
    """Compare the compiled step with the plain one; return the kernels of its one graph."""
    from torch._inductor import config

    seen: list[list] = []
    # As on a GPU parts are joined by the kernels that make them.
    config._post_fusion_custom_pass = lambda n: seen.append(n) or n
    config.force_pointwise_cat = True
    config.cpp.simdlen = 1  # in vectors they do not compile for a CPU
    plain, fast = learner(), learner()
    fast._graph = torch.compile(fast._drafted, fullgraph=True, dynamic=False)
    assert all(map(torch.equal, play(plain), play(fast)))
    assert torch.allclose(plain.block.sums.products, fast.block.sums.products, atol=1e-4)
    assert torch.allclose(plain._hits / plain._tries, fast._hits / fast._tries)
    assert bool((fast._tries != 1).all())  # copies and block were measured
    (nodes,) = seen  # one graph for all steps
    return sum(type(getattr(each, "node", None)).__name__ != "AssertScalar" for each in nodes)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no compiler of C++")
def test_the_compiled_step_drafts_and_sums_the_same_in_few_kernels() -> None:
    """In a process of its own, where calls are not checked."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.check_output([sys.executable, __file__], env=environment, text=True)
    assert int(found) <= 24


def test_a_step_that_does_not_compile_runs_without_it(caplog: pytest.LogCaptureFixture) -> None:
    plain, other = learner(), learner()
    other._graph = Mock(side_effect=TorchDynamoException("no kernel"))
    assert all(map(torch.equal, play(plain), play(other)))
    assert caplog.text.count("drafts are not compiled, and so cost more: no kernel") == 1


class NoWait(TorchDispatchMode):
    """A pretended GPU, `meta`, on which what waits for the host is an error."""

    def __torch_dispatch__(self, call, kinds, args=(), options=None):
        name, options = call.overloadpacket.__name__, options or {}
        on_device = [each.is_meta for each in args if isinstance(each, torch.Tensor) and each.ndim]
        if name == "_to_copy" and options.get("device") is not None:
            on_device.append(options["device"] == META)
        waits = name in ("_local_scalar_dense", "nonzero", "masked_select") and args[0].is_meta
        waits |= len(set(on_device)) > 1 and not options.get("non_blocking")
        assert not waits, f"{call} waits for the device"
        return call(*args, **options)


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps with V2's draws, whose rows fill the buffer."""
    learned, tensor = learner(META), torch.tensor
    runner = SimpleNamespace(learned=learned, _draw=lambda full, *_, **__: full.argmax(-1))
    learned._draw, learned.block._room = partial(LearnedSpeculator.draw, runner), 100
    # A tensor that is made of numbers on a device is a copy that waits.
    monkeypatch.setattr(torch, "tensor", lambda *a, device=None, **options: tensor(*a, **options))
    with NoWait():
        assert {each.shape for each in play(learned)} == {(8, DEPTH + 1), (5, DEPTH + 1)}


def test_sums_follow_steps_and_their_readers_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Stream(str):
        def wait_stream(self, other: str) -> None:
            order.append(f"{self} waits for {other}")

    block = learner().block
    block._stream = Stream("sums")  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("steps"))
    monkeypatch.setattr(torch.cuda, "stream", lambda at: order.append(f"on {at}") or nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: order.append("kept"))
    block.reserve(RUNNING)
    block._flush()
    block.solve()
    begin = ["sums waits for steps", "on sums"]
    assert order[:9] == [*begin, *["kept"] * 4, *begin, "steps waits for sums"]


if __name__ == "__main__":
    print(kernels())
