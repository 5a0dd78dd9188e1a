"""Both model runners give one drafter the same steps, and it learns to draft what is written.

A machine writes texts as vLLM does: ragged steps, prompts in parts, refused drafts, requests that
are preempted, end, and leave their places to others.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from longtail.errors import ConfigError
from longtail.sampling import gumbel_noise
from longtail.vllm import learned_worker
from longtail.vllm.learned_v1 import LearnedProposer, _propose_draft_token_ids
from longtail.vllm.learned_v2 import LearnedSpeculator
from longtail.vllm.learned_worker import _execute_model, _load_model, open_learned
from support import toy
from support.vllm_releases import untouched
from unit.vllm.test_ridge import DEPTH, EMBEDDING, HEAD, HIDDEN, VOCAB, model

LENGTH, CHUNK = 96, 5
BEFORE = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))


def config(**settings: object) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config={"longtail": {"drafter": "learned", **settings}},
        model_config=SimpleNamespace(dtype=torch.float32, max_model_len=LENGTH),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        speculative_config=SimpleNamespace(num_speculative_tokens=DEPTH),
    )


def state(text: list[int], at: int) -> torch.Tensor:
    """The target's state at a token, which tells the next one."""
    return 2 * EMBEDDING[text[at]] + BEFORE[text[max(at - 1, 0)]]


def next_token(text: list[int], at: int, key: int) -> int:
    """The target's own draw after a token."""
    logits = HEAD(state(text, at)).detach()
    return int((logits + gumbel_noise(torch.tensor([key]), torch.tensor([at + 1]), VOCAB)).argmax())


@dataclass
class Request:
    key: int
    text: list[int]
    prompt_len: int
    computed: int = 0
    drafts: list[int] = field(default_factory=list)


@dataclass
class Given:
    """A step as the machine took it."""

    requests: list[Request]
    names: list[str]
    rows: list[list[int]]
    """Tokens of each request's rows."""
    starts: list[int]
    """Position of each request's first row."""
    states: torch.Tensor
    sampled: list[list[int]]


def take(names: list[str], requests: list[Request]) -> Given:
    """Compute a step, draw, verify, and append to the texts."""
    rows, starts, states, sampled = [], [], [], []
    for each in requests:
        is_prompt = each.computed < len(each.text) - 1
        fed = each.text[each.computed :][:CHUNK] if is_prompt else [each.text[-1], *each.drafts]
        whole = each.text[: each.computed] + fed
        starts.append(each.computed)
        rows.append(fed)
        places = range(each.computed, len(whole))
        states += [state(whole, at) for at in places]
        new = []
        if len(whole) >= len(each.text):
            for at in range(len(each.text) - 1, len(whole)):
                new.append(next_token(whole, at, each.key))
                if at + 1 < len(whole) and whole[at + 1] != new[-1]:
                    break
        each.text += new
        each.computed = len(each.text) - 1 if new else len(whole)
        sampled.append(new)
    return Given(requests, names, rows, starts, torch.stack(states), sampled)


def v1_drafts(proposer: Any, step: Given) -> list[list[int]]:
    lengths, old = [len(each.text) for each in step.requests], fresh(step)
    texts = torch.zeros(len(step.names), LENGTH, dtype=torch.int32)
    for row, each in zip(texts, step.requests, strict=True):
        row[: len(each.text)] = torch.tensor(each.text)
    proposer.longtail_keys = torch.tensor([each.key for each in step.requests])
    bounds = np.cumsum([0, *map(len, step.rows)]).astype(np.int32)
    runner = SimpleNamespace(
        drafter=proposer,
        requests=set(step.names),
        input_batch=SimpleNamespace(
            req_ids=step.names,
            num_prompt_tokens=np.array([each.prompt_len for each in step.requests]),
            token_ids_cpu_tensor=texts,
            num_tokens_no_spec=np.array(lengths),
        ),
        query_start_loc=SimpleNamespace(gpu=torch.from_numpy(bounds)),
        positions=positions(step),
        input_ids=SimpleNamespace(gpu=flat(step)),
    )
    output = SimpleNamespace(
        scheduled_spec_decode_tokens={
            name: row[1:]
            for name, row, new in zip(step.names, step.rows, step.sampled, strict=True)
            if new and len(row) > 1 and name not in old
        },
        num_spec_tokens_to_schedule=DEPTH,
    )
    sampling = SimpleNamespace(all_greedy=False, temperature=torch.ones(len(step.names)))
    drafts: list[list[int]] = _propose_draft_token_ids(
        untouched, runner, output, step.sampled, sampling, step.states
    )
    return drafts


def fresh(step: Given) -> set[str]:
    """Names of requests whose rows are of a prompt, or of a text that is read again."""
    drafted = zip(step.names, step.requests, step.rows, step.starts, step.sampled, strict=True)
    return {
        name
        for name, each, row, start, new in drafted
        if start + len(row) <= len(each.text) - len(new)
    }


def flat(step: Given) -> torch.Tensor:
    return torch.tensor([token for row in step.rows for token in row], dtype=torch.int32)


def positions(step: Given) -> torch.Tensor:
    pairs = zip(step.starts, step.rows, strict=True)
    return torch.cat([torch.arange(start, start + len(row)) for start, row in pairs])


def v2_drafts(speculator: Any, step: Given, places: dict[str, int]) -> torch.Tensor:
    """Draft for the same step; a request's place is another one than in the batch."""
    requests = speculator._requests
    requests.req_id_to_index = dict(places)
    index = torch.tensor([places[name] for name in step.names])
    last, seeds = torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    for place, each in zip(index.tolist(), step.requests, strict=True):
        requests.prompt_len.np[place] = each.prompt_len
        requests.prefill_len.np[place] = len(each.text)
        requests.all_token_ids.gpu[place, : len(each.text)] = torch.tensor(each.text)
        last[place], seeds[place] = each.text[-1], each.key
    old = fresh(step)
    rejected = [
        len(row) - len(new) if new and name not in old else 0
        for name, row, new in zip(step.names, step.rows, step.sampled, strict=True)
    ]
    batch = SimpleNamespace(
        num_reqs=len(step.names), req_ids=step.names, idx_mapping=index,
        idx_mapping_np=index.numpy(), input_ids=flat(step), positions=positions(step),
        query_start_loc=torch.tensor(np.cumsum([0, *map(len, step.rows)])),
        seq_lens_cpu_upper_bound=torch.tensor(
            [start + len(row) for start, row in zip(step.starts, step.rows, strict=True)]
        ),
    )  # fmt: skip
    return speculator.propose(
        batch, None, None, step.states, None, torch.tensor([len(each) for each in step.sampled]),
        torch.tensor(rejected), last, last, torch.ones(4), seeds,
        num_speculative_tokens=DEPTH,
    )  # fmt: skip


def sample(logits: Any, index: Any, temperature: Any, seeds: Any, at: Any, **_: Any) -> Any:
    """vLLM's gumbel_sample, with longtail's noise under vLLM's position."""
    return (logits + gumbel_noise(seeds[index], at + 1, VOCAB)).argmax(-1)


@pytest.mark.parametrize("history", [False, True])
def test_both_runners_draft_the_same_and_acceptance_rises(history: bool) -> None:
    chosen = config(depth=DEPTH, history=history)
    v1 = LearnedProposer()
    v1.learned = open_learned(model(), chosen, v1.draw)
    table = SimpleNamespace(
        req_id_to_index={},
        prompt_len=SimpleNamespace(np=np.zeros(4, dtype=np.int32)),
        prefill_len=SimpleNamespace(np=np.zeros(4, dtype=np.int32)),
        all_token_ids=SimpleNamespace(gpu=torch.zeros(4, LENGTH, dtype=torch.int32)),
    )
    v2 = LearnedSpeculator(chosen, torch.device("cpu"), table, sample)
    v2.learned = open_learned(model(), chosen, v2.draw)
    running, places, free, begun = dict[str, Request](), dict[str, int](), [2, 0, 3, 1], 0
    accepted, drafted = [], []
    generator = np.random.default_rng(0)
    for number in range(160):
        while len(running) < 3:
            prompt = list(map(int, generator.integers(VOCAB, size=3 + 4 * (begun % 3 // 2))))
            running[f"r{begun}"] = Request(key=begun, text=prompt, prompt_len=len(prompt))
            places[f"r{begun}"] = free.pop(0)
            begun += 1
        if number % 40 == 39:  # a preempted request is read again
            first = running[next(iter(running))]
            first.computed, first.drafts = 0, []
        names = list(running)[:: -1 if number % 2 else 1]
        step = take(names, [running[name] for name in names])
        had = [each.drafts for each in step.requests]
        for new, drafts in zip(step.sampled, had, strict=True):
            accepted.append(max(len(new) - 1, 0) if drafts else 0)
            drafted.append(bool(drafts))
        ours, theirs = v1_drafts(v1, step), v2_drafts(v2, step, places)
        for name, own, other in zip(names, ours, theirs.tolist(), strict=True):
            assert other[: len(own)] == own
            each = running[name]
            each.drafts = own if each.computed == len(each.text) - 1 else []
            if len(each.text) > LENGTH - 2 * DEPTH - 2:
                del running[name]
                free.append(places.pop(name))
    assert torch.allclose(v1.learned.block.sums.products, v2.learned.block.sums.products, atol=1e-2)
    assert sum(accepted[-180:]) / sum(drafted[-180:]) > 0.5


def test_a_drafter_of_another_kind_is_refused_as_a_beginning() -> None:
    wanted = config(begin=str(toy.DRAFTERS["eagle1"]))
    with pytest.raises(ConfigError, match="it is eagle1, and a learned drafter is ridge"):
        open_learned(model(), wanted, LearnedProposer().draw)


def test_weights_that_differ_change_the_policy_once_and_equal_ones_lose_nothing() -> None:
    """The step after new weights, in place or loaded one by one, counts earlier texts a quarter."""
    weights = torch.nn.ModuleList([torch.nn.Linear(3, 300), torch.nn.LayerNorm(3)])
    target = model(parameters=weights.parameters)
    learned = open_learned(target, config(), LearnedProposer().draw)
    learned.block.sums.products.fill_(1.0)
    v1, fed = LearnedProposer(), Request(key=0, text=[1, 2, 3], prompt_len=3)
    v1.learned = learned
    runner = SimpleNamespace(get_model=lambda: target)
    worker = SimpleNamespace(model_runner=runner, longtail_learned=learned)

    def stock(self: Any, output: Any) -> Any:
        return v1_drafts(v1, take(["r"], [fed]))

    def left_after(new: int, *changed: int, loads: int = 0, pauses: bool = False) -> float:
        """Execute a step with `new` of one request, after changes of these modules."""
        with torch.no_grad():
            for place in changed:
                next(weights[place].parameters()).view(-1)[-1].add_(1e-3)
        for _ in range(loads):
            target.load_weights(weights=[])
        num_tokens = {"r": 1}
        output = SimpleNamespace(num_scheduled_tokens=num_tokens, scheduled_new_reqs=["r"][:new])
        output.longtail_has_paused = pauses
        _execute_model(stock, worker, output)
        return float(learned.block._sums.products.unique())

    assert left_after(1) == 1
    assert left_after(0, 0) == 1  # requests run
    assert left_after(1) == 1 / 4
    assert left_after(1, 1) == 1 / 16
    assert left_after(1) == 1 / 16
    assert left_after(0, 1, 0, loads=2) == 1 / 64
    assert left_after(1) == 1 / 64
    assert left_after(0, 1, pauses=True) == 1 / 256  # as prime-rl pauses, with requests
    assert left_after(0, pauses=True) == 1 / 256


def test_weights_whose_load_is_not_ended_are_looked_at_afterwards() -> None:
    """Packed weights are without data from a trainer's load to the next forward pass."""
    weights = torch.nn.ModuleList([torch.nn.Linear(3, 300), torch.nn.LayerNorm(3)])
    target = model(parameters=weights.parameters)
    learned = open_learned(target, config(), LearnedProposer().draw)
    target.load_weights([])
    whole, weights[0] = weights[0], torch.nn.Linear(3, 300, device="meta")
    learned.look(target)
    assert learned.has_changed
    weights[0], learned.has_changed = whole, False
    learned.look(target)
    assert not learned.has_changed


def test_the_drafter_is_opened_after_the_weights_outside_of_their_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What lies in vLLM's pool of weights is lost when it sleeps deeply, as TRL and verl let it."""
    order = list[str]()
    drafter = SimpleNamespace(learned=None, draw=None)
    runner = SimpleNamespace(get_model=lambda: "target", drafter=drafter)
    worker = SimpleNamespace(model_runner=runner, vllm_config=None)
    monkeypatch.setattr(learned_worker, "open_learned", lambda model, *_: order.append(model))
    _load_model(lambda _: order.append("weights"), worker)
    assert order == ["weights", "target"]
