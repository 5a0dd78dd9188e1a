"""Features kept while the engine writes: row t is what the target computes at token t, or nothing.

A feature one place off trains a drafter that never works, and nothing fails. So every row that is
found is compared with one packed pass over the text: under drafts that are right, wrong and ragged,
preemption, shared prompts and prompts in chunks.
"""

from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch

from longtail.engine.batch import Scheduled
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import ActiveRequest, EngineLimits
from longtail.engine.speculation.feature_store import FeatureStore
from longtail.engine.speculation.speculator import Speculation
from longtail.engine.speculation.token_queue import Computed
from longtail.model.hf.weights import hf_rows
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import Taps
from longtail.types import Request
from support.drafters import WRONG, Script, ScriptedDrafter, ragged, silent
from support.engine_requests import CROWDED, ROOMY, TREE, features_of, make_requests, write
from support.tiny_models import tiny_model

pytestmark = pytest.mark.many_steps
TAPS = Taps(layers=(0, 1), final=True)
CHUNKED = EngineLimits(max_running=5, max_step_tokens=9, max_len=64)
ROW = 3 * 32 * 8
"""Bytes of the features of a token: three states of 32 numbers in float64."""


def make_engine(
    model: Transformer,
    limits: EngineLimits = ROOMY,
    *,
    script: Script = silent,
    requests: Sequence[Request] = (),
    max_bytes: int = 10**6,
) -> tuple[RolloutEngine, FeatureStore]:
    """An engine that keeps features, and drafts what the script says of the requests' texts."""
    engine, store = RolloutEngine(model, str, limits), FeatureStore(TAPS, max_bytes)
    texts: defaultdict[str, tuple[int, ...]] = defaultdict(tuple)
    texts |= zip((r.request_id for r in requests), write(engine, requests), strict=True)
    # The drafter reads only the final state: the store picks its own columns.
    drafter = ScriptedDrafter(texts, script, taps=Taps(final=True))
    engine.speculate(
        Speculation(
            drafters=(drafter,),
            tuner=Speculation.fixed(drafter, TREE).tuner,
            guarded=False,
            features=store,
        )
    )
    return engine, store


def room_for(num_rows: int) -> int:
    """Bytes of a store for `count` tokens: a quarter is for pending steps."""
    return -(-num_rows * ROW * 4 // 3)


def assert_kept(store: FeatureStore, model: Transformer, text: Sequence[int]) -> None:
    """All rows but the last belong to the text; the last row is NaN."""
    rows = store.find(text)
    assert rows is not None, "the text is not whole"
    assert len(rows) == len(text)
    assert rows[-1].isnan().all()
    exact = features_of(model, text, store.taps)
    torch.testing.assert_close(rows[:-1], exact[:-1], rtol=0.0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "script", "limits", "prompts"),
    [
        ("mistral", ragged(3), ROOMY, "apart"),
        ("llama", silent, ROOMY, "apart"),
        ("qwen2", WRONG, CROWDED, "apart"),
        ("qwen3", ragged(4), CROWDED, "grouped"),
        ("qwen3", ragged(4), CHUNKED, "alike"),
    ],
)
def test_every_row_belongs_to_its_token_with_any_draft(family, script, limits, prompts) -> None:
    """The rows of shared KV are those of the request that computed it."""
    model, requests = tiny_model(family, dtype=torch.float64), make_requests(prompts)
    engine, store = make_engine(model, limits, script=script, requests=requests)
    store.clear()
    scheduler, accepted = engine.scheduler, [0]
    before = (scheduler.num_preemptions, scheduler.num_shared_tokens)
    done = engine.generate(
        requests, lambda step: accepted.append(sum(v.num_accepted for v in step.verified))
    )
    assert (sum(accepted) > 0) == (script not in (silent, WRONG))
    assert (scheduler.num_preemptions > before[0]) == (limits is CROWDED)
    assert (scheduler.num_shared_tokens > before[1]) == (prompts != "apart")
    texts = [(*r.prompt_tokens, *each.tokens) for r, each in zip(requests, done, strict=True)]
    for text in texts:
        assert_kept(store, model, text)
    # Each token once, however often it was computed; what is shared, once for all.
    num_rows, num_tokens = store.num_bytes // ROW, sum(len(text) - 1 for text in texts)
    assert num_rows == num_tokens if prompts == "apart" else num_rows < num_tokens


def test_a_window_of_a_text_is_found_only_where_it_is_a_beginning() -> None:
    """Inside a text, features depend on what a window does not hold."""
    model, requests = tiny_model(dtype=torch.float64), make_requests()[3:4]
    engine, store = make_engine(model)
    (text,) = write(engine, requests)
    for end in range(2, len(text)):
        assert_kept(store, model, text[:end])
    assert all(store.find(text[start:]) is None for start in range(1, 5))
    changed = (*text[:-3], (text[-3] + 1) % 128, *text[-2:])
    assert store.find(changed) is None
    assert store.find(text[:-2]) is not None
    assert store.find((*text, 5)) is None
    assert store.find(text[:1]) is None


def test_an_aborted_text_stays_and_its_name_may_be_used_again() -> None:
    model = tiny_model(dtype=torch.float64)
    first, second = make_requests()[3], make_requests(seed=1)[3]
    assert first.request_id == second.request_id
    engine, store = make_engine(model)
    engine.submit(first)
    for _ in range(6):
        engine.step()
    ((_, aborted, _),) = engine.unfinished()
    engine.abort(first.request_id)
    (text,) = write(engine, [second])
    assert text[: len(aborted)] != aborted
    for each in (aborted, text):
        assert_kept(store, model, each)


@pytest.mark.parametrize("aside", [False, True], ids=["in place", "set aside"])
def test_other_weights_leave_no_feature_of_the_old_ones(aside) -> None:
    """Also if speculation was off while the weights changed."""
    model, requests = tiny_model(dtype=torch.float64), make_requests()[:4]
    engine, store = make_engine(model)
    texts = write(engine, requests)
    assert store.num_bytes > 0
    speculation = engine.speculation
    if aside:
        engine.speculate(None)
    other = tiny_model(seed=1, dtype=torch.float64)
    engine.load_policy(1, hf_rows(other).items())
    engine.speculate(speculation)
    assert store.num_bytes == 0
    for text in texts:
        assert store.find(text) is None
    for text in write(engine, requests):
        assert_kept(store, model, text)


@pytest.mark.slow
def test_memory_is_bounded_and_dropped_texts_are_missing() -> None:
    """After any drops: never more than `max_bytes`, and no row of another text."""
    model, requests = tiny_model(dtype=torch.float64), make_requests("grouped")
    whole = sum(len(r.prompt_tokens) + r.sampling.max_tokens for r in requests)
    for num_rows in (0, whole // 2, whole):
        max_bytes = room_for(num_rows) + 7
        engine, store = make_engine(
            model, CROWDED, script=ragged(2), requests=requests, max_bytes=max_bytes
        )
        sizes: list[int] = []
        done = engine.generate(requests, lambda _, s=store, n=sizes: n.append(s.num_bytes))
        assert max(sizes) <= max_bytes
        found = 0
        for request, each in zip(requests, done, strict=True):
            text = (*request.prompt_tokens, *each.tokens)
            if store.find(text) is not None:
                assert_kept(store, model, text)
                found += 1
        assert found == len(requests) if num_rows == whole else found < len(requests)
        store.clear()
        assert store.num_bytes == 0


def in_progress(prompt_len: int, *more: int) -> ActiveRequest:
    prompt = tuple(range(1, prompt_len + 1))
    request = Request(request_id=str(more), prompt_tokens=prompt, noise_key=0)
    return ActiveRequest(request=request, tokens=[*prompt, *more], policy_version=0)


def step_of(active: ActiveRequest, start: int, end: int) -> Computed:
    """A step that computed some tokens of a request; the feature of a token is its place."""
    features = torch.arange(start, end, dtype=torch.float64)[:, None]
    return Computed([Scheduled(active=active, num_tokens=end - start)], [end], {}, features)


def test_a_prompt_that_was_cut_short_goes_on_behind_a_siblings() -> None:
    """Preempted in mid-prompt, a request comes back with the KV that a sibling has computed."""
    store = FeatureStore(Taps(final=True), 10**4)
    one, other = in_progress(6, 7, 8, 9), in_progress(6, 6, 6)
    store.add(step_of(one, 0, 2))
    assert store.find(one.tokens[:4]) is None
    store.add(step_of(other, 0, 6))
    store.add(step_of(one, 5, 8))
    for active, num_computed in ((one, 8), (other, 6)):
        rows = store.find(active.tokens[: num_computed + 1])
        assert rows is not None
        assert rows[:-1, 0].tolist() == list(range(num_computed))


def test_a_text_without_its_beginning_takes_no_memory() -> None:
    store = FeatureStore(Taps(final=True), 10**4)
    active = in_progress(3, *range(4, 9))
    store.add(step_of(active, 4, 5))
    store.add(step_of(active, 5, 7))
    assert store.find(active.tokens) is None
    assert store.num_bytes == 0
