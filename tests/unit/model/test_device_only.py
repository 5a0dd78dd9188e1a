"""GPU code mixes no devices and reads no value on the host before its end.

The tests use PyTorch's meta device, which has shapes but no values: reading a value, or combining
a tensor with one of the host, raises.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longtail.drafter.eagle import layer as eagle
from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.drafter.eagle.walker import EagleWalker
from longtail.engine.batch import Scheduled, flatten
from longtail.engine.kv.cache import KeptPath
from longtail.engine.kv.paged_cache import PagedKVCache
from longtail.engine.request import ActiveRequest
from longtail.engine.step import sampler
from longtail.engine.step.runner import ModelRunner, StepGraphs
from longtail.engine.step.sampler import KeyedSampler
from longtail.model import transformer
from longtail.model.graphs import GraphBackend, GraphPool, Outputs
from longtail.model.kernels.draws import TorchDraws
from longtail.model.kernels.gpu import GpuKernels
from longtail.model.kernels.pages import TorchPageKernels
from longtail.model.transformer import Transformer
from longtail.speculation import grow
from longtail.speculation.drafter import Draftable, Drafter, Observed, Taps
from longtail.speculation.grow import Walker
from longtail.speculation.strategy import DraftThresholds, Strategy
from longtail.speculation.tree import DraftTree
from longtail.types import Request, SamplingParams
from support.fake_graphs import tensors
from support.tiny_models import tiny_config

DEVICE = torch.device("meta")
VOCAB = tiny_config().vocab_size


class NoGraphs(GraphBackend):
    def capture(self, body: object) -> tuple[object, Outputs]:
        return (lambda: None), body()

    def reserved_bytes(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def _like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernels = GpuKernels(TorchPageKernels())
    for module in (transformer, eagle):
        monkeypatch.setattr(module, "select_kernels", lambda *_: kernels)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # meta has none to ask
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda *_: torch.float32)
    with torch.inference_mode():
        yield


def make_model() -> Transformer:
    with torch.device(DEVICE):
        model = Transformer(tiny_config())
    model.graphs = GraphPool(NoGraphs())
    model.pack()
    return model


def active(name: str, computed: int, total: int, **sampling: float) -> ActiveRequest:
    request = Request(
        request_id=name, prompt_tokens=(1, 2), noise_key=3, sampling=SamplingParams(**sampling)
    )
    return ActiveRequest(
        request=request, tokens=[1] * total, policy_version=0, num_computed=computed
    )


def make_step(model: Transformer, **sampling: float) -> tuple[PagedKVCache, list[Scheduled]]:
    """Make a cache, and a step of a request with a draft and of one without."""
    kv = PagedKVCache(
        model.config,
        num_tokens=256,
        max_rows=4,
        max_len=128,
        dtype=model.dtype,
        device=DEVICE,
        kernels=TorchPageKernels(),
    )
    drafted, plain = active("a", 4, 5, **sampling), active("b", 6, 7)
    for each in (drafted, plain):
        assert kv.try_grow(each.request_id, 40)
    tree = DraftTree(tokens=(1, 2), parents=(0, 0), margins=(0.0, 0.0))
    return kv, [
        Scheduled(active=drafted, num_tokens=1, draft=tree),
        Scheduled(active=plain, num_tokens=1),
    ]


def test_a_step_stays_on_its_device():
    """Steps with a captured draft, with and without truncation, and with prefill."""
    model = make_model()
    kv, scheduled = make_step(model, top_k=5)
    new = active("c", 0, 20)
    assert kv.try_grow("c", 40)
    graphs, batch = StepGraphs(model, kv, model.graphs), flatten(scheduled, DEVICE)
    assert graphs.fits(batch)
    logits, features = graphs.run(batch, Taps(layers=(1,), final=True))
    drawn = KeyedSampler(TorchDraws(), VOCAB, DEVICE).draw(logits, scheduled)
    assert (logits.shape, drawn.tokens.shape) == ((4, VOCAB), (4,))
    kv.keep([KeptPath(request_id="a", num_tokens=5, path=(2,))])

    prefills = flatten([scheduled[1], Scheduled(active=new, num_tokens=20)], DEVICE)
    assert not graphs.fits(prefills)
    tapped = model.forward_with_features(
        prefills.tokens, prefills.positions, kv.attention(prefills), Taps(final=True)
    )
    everything = tensors([logits, features, drawn.tokens, drawn.logprobs, tapped.hidden])
    assert all(each.device == DEVICE for each in everything)


class Homeward(TorchDispatchMode):
    """A mode that returns zeros for copies to the host and records all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        to_host = kwargs.get("device") == torch.device("cpu")
        if to_host and isinstance(args[0], Tensor) and args[0].device == DEVICE:
            assert kwargs["non_blocking"], "the host would wait"
            self.log.append("home")
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        self.log.append(str(func))
        return func(*args, **kwargs)


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "as-it-is"])
def test_the_host_reads_a_step_once_after_everything_was_launched(captured, monkeypatch):
    """An earlier read would make the feedback wait for the pass."""
    monkeypatch.setattr(sampler, "select_draws", lambda *_: TorchDraws())
    model = make_model()
    if not captured:
        model.graphs = None
    kv, scheduled = make_step(model)
    runner = ModelRunner(model, kv)
    with Homeward() as watched:
        launched = runner.launch(flatten(scheduled, DEVICE), scheduled, Taps(final=True))
    assert watched.log.count("home") == 2
    assert watched.log[-2:] == ["home", "home"]
    out = launched.wait()
    assert (len(out.tokens), len(out.logprobs)) == (4, 4)


def make_drafter(kind: str, model: Transformer) -> Drafter:
    layers = (0, 1) if kind == "eagle3" else ()
    config = EagleConfig(recipe=kind, target=model.config, layers=layers)
    with torch.device(DEVICE):
        return EagleDrafter(EagleLayer(config), model)


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("sent to the device in the middle of a draft")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_draft_stays_on_its_device_until_it_is_read(kind, monkeypatch):
    """After the first pass nothing is sent to the device, and the draft is read once, at the end.

    That includes the decision whether a level is worth a pass: the depth of the third draft is
    predicted from the second, in which no level seemed to pay.
    """
    model = make_model()
    drafter, one = make_drafter(kind, model), active("a", 0, 1)
    size = (len(drafter.taps.layers) + drafter.taps.final) * model.config.hidden_size
    root, reads = EagleWalker.root, []

    def read(tokens: Tensor, *others: Tensor) -> list[Tensor]:
        assert all(each.device == DEVICE for each in (tokens, *others))
        reads.append((tokens.shape[1], len(others) - 3))
        return [torch.full(each.shape, -1.0, dtype=torch.float64) for each in (tokens, *others)]

    def launch(own: Walker) -> Tensor:
        logits = root(own)
        during.setattr(torch, "tensor", refuse)
        return logits

    for worth in (
        DraftThresholds(),
        DraftThresholds(expand=0.1, level=0.5),
        DraftThresholds(expand=0.1, level=0.5),
    ):
        told = len(one.tokens) - 1
        one.tokens += [1, 1, 1]
        seen = Observed(request_id="a", tokens=one.tokens, start=told, num_tokens=3, prompt_len=2)
        drafter.observe([seen], torch.zeros(3, size, device=DEVICE))
        noise = KeyedSampler(TorchDraws(), VOCAB, DEVICE).noise.for_drafts([one], 4)
        asked = Draftable(
            request_id="a",
            tokens=one.tokens,
            prompt_len=2,
            sampling=SamplingParams(temperature=0.5),
            max_depth=9,
        )
        strategy = Strategy(depth=4, width=2, size=9, beam=2, thresholds=worth)
        with monkeypatch.context() as during:
            during.setattr(grow, "_read", read)
            during.setattr(EagleWalker, "root", launch)
            drafter.propose([asked], strategy, noise)
    assert reads == [(14, 0), (14, 3), (2, 1)], "candidates, and gains of levels"
