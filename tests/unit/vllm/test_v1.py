"""Texts of vLLM's V1 runner are those of plain keyed decoding, whatever is drafted."""

from types import SimpleNamespace

import pytest
import torch

from longtail.errors import ConfigError
from longtail.sampling import gumbel_noise
from longtail.vllm import v1, v1_cpu
from longtail.vllm.guards import VllmSettings
from longtail.vllm.v1 import draw, draw_drafts, request_key
from support import vllm_v1
from support.vllm_v1 import VOCAB

PROMPT, LENGTH = 3, 12


@pytest.fixture
def vllm(monkeypatch):
    """Stand-ins of vLLM with the patches of coupled drafts."""
    stand_ins = vllm_v1.install(monkeypatch)
    for patch in v1.patches(VllmSettings()):
        monkeypatch.setattr(patch.owner, patch.name, patch.replacement)
    return stand_ins


def logits_after(text):
    """Return the target's logits, a function of the text."""
    generator = torch.Generator().manual_seed(hash(tuple(text)) % 2**31)
    return 2 * torch.randn(VOCAB, generator=generator)


class Engine:
    """A runner that decodes requests step by step, with drafts from `drafts_of(text)`."""

    def __init__(self, vllm, temperatures, seeds, top_k=None):
        config = SimpleNamespace(
            model_config=SimpleNamespace(seed=0),
            parallel_config=SimpleNamespace(data_parallel_rank=0),
        )
        self.runner = vllm.runner(config, "cpu")
        self.names = [f"request-{index}" for index in range(len(seeds))]
        self.texts = [[index] * PROMPT for index in range(len(seeds))]
        for name, seed in zip(self.names, seeds, strict=True):
            params = SimpleNamespace(seed=seed)
            self.runner.requests[name] = SimpleNamespace(sampling_params=params)
        heat = torch.tensor(temperatures)
        self.runner.input_batch = SimpleNamespace(
            generators={},
            req_ids=self.names,
            sampling_metadata=SimpleNamespace(
                temperature=heat, top_k=top_k, all_greedy=False, all_random=bool((heat > 0).all())
            ),
        )

    def step(self, drafts):
        """Verify the drafts of each request; None: a plain step."""
        rows = [
            [text[: len(text)] + each[:n] for n in range(len(each) + 1)]
            for text, each in zip(self.texts, drafts or [[]] * len(self.texts), strict=True)
        ]
        flat = [row for group in rows for row in group]
        logits = torch.stack([logits_after(row) for row in flat])
        ends = torch.tensor([len(group) for group in rows]).cumsum(0)
        self.runner.positions[: len(flat)] = torch.tensor([len(row) - 1 for row in flat])
        self.runner.query_start_loc.gpu[1 : len(rows) + 1] = ends
        metadata = None
        if drafts is not None:
            bonus = ends - 1
            is_target = torch.ones(len(flat), dtype=torch.bool).index_fill(0, bonus, False)
            metadata = SimpleNamespace(
                logits_indices=torch.arange(len(flat)),
                bonus_logits_indices=bonus,
                target_logits_indices=is_target.nonzero()[:, 0],
                num_draft_tokens=[len(each) for each in drafts],
                draft_token_ids=torch.tensor([t for each in drafts for t in each]).long(),
            )
        found = self.runner._sample(logits, metadata).tolist()
        for text, tokens in zip(self.texts, found, strict=True):
            text.extend(token for token in tokens if token >= 0)

    def decode(self, drafts_of=None):
        """Decode until all texts are long enough, and cut them to one length."""
        while min(map(len, self.texts)) < LENGTH:
            self.step(drafts_of and [drafts_of(i, text) for i, text in enumerate(self.texts)])
        return [text[:LENGTH] for text in self.texts]


KINDS = {
    "wrong": lambda plain, i, text: [VOCAB - 1, 0],
    "right": lambda plain, i, text: plain[i][len(text) : len(text) + 3],
    "ragged": lambda plain, i, text: plain[i][len(text) : len(text) + (i + len(text)) % 4],
    "half right": lambda plain, i, text: [*plain[i][len(text) : len(text) + 1], 1, 2],
    "none": lambda plain, i, text: [],
}


@pytest.mark.parametrize("top_k", [None, torch.full((4,), 4, dtype=torch.int32)])
def test_a_text_does_not_depend_on_its_drafts(vllm, top_k):
    given = vllm, [1.0, 0.7, 0.0, 1.3], [5, -6, 7, None], top_k
    plain = Engine(*given).decode()
    for kind, drafts in KINDS.items():
        found = Engine(*given).decode(lambda i, text, drafts=drafts: drafts(plain, i, text))
        assert found == plain, kind


def test_a_token_is_longtails_draw_at_its_position(vllm):
    engine = Engine(vllm, [1.0], [99])
    text = engine.decode()[0]
    for position in range(PROMPT, LENGTH):
        noise = gumbel_noise(torch.tensor([99]), torch.tensor([position]), VOCAB)[0]
        scores = logits_after(text[:position]).log_softmax(-1) + noise
        assert text[position] == int(scores.argmax())


def test_coupled_drafts_equal_the_draws_of_a_target_with_the_same_logits(vllm):
    proposer = vllm.proposer()
    proposer.longtail_keys = torch.tensor([3, 4])
    proposer.model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    rows = torch.tensor([1, 3])
    target_positions = torch.tensor([6, 7, 1, 2])
    proposer.set_inputs_first_pass(None, None, target_positions, None, rows, None, None)
    sampling = SimpleNamespace(all_greedy=False, temperature=torch.tensor([1.0, 0.7]))
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    for ahead in (2, 3, 4):  # the draft of row p stands at p + 2, the next ones behind it
        drafts, probs = proposer._sample_draft_tokens(logits, sampling)
        at = target_positions[rows] + ahead
        scaled = logits / sampling.temperature[:, None]
        assert torch.equal(drafts, draw(scaled, proposer.longtail_keys, at))
        assert probs is None


def test_drafts_of_a_reduced_vocabulary_use_the_noise_of_their_target_tokens():
    keys, positions = torch.tensor([8]), torch.tensor([5])
    entries = torch.tensor([2, 3, 7, 11])
    logits = torch.zeros(1, 4)
    noise = gumbel_noise(keys, positions, VOCAB)[0, entries]
    drafts = draw_drafts(logits, torch.tensor([1.0]), keys, positions, entries)
    assert drafts.tolist() == [int(entries[noise.argmax()])]
    greedy = draw_drafts(logits + torch.eye(4)[2], torch.tensor([0.0]), keys, positions, entries)
    assert greedy.tolist() == [7]


def test_drafts_stay_vllms_where_rows_are_not_one_per_request(vllm):
    proposer = vllm.proposer()
    proposer.model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    sampling = SimpleNamespace(all_greedy=False, temperature=torch.ones(3))
    for keys in (None, torch.zeros(3).long()):
        proposer.longtail_keys = proposer.longtail_next = keys
        proposer.parallel_drafting = keys is not None
        drafts, _ = proposer._sample_draft_tokens(torch.eye(VOCAB)[:3], sampling)
        assert drafts.tolist() == [0, 1, 2]


def test_requests_without_a_seed_have_keys_of_their_own():
    key = request_key("0.0", "12-0a1b2c3d")
    assert key == request_key("0.0", "12-ffffffff") == request_key("0.0", "12")
    assert (
        len({key, request_key("0.0", "13"), request_key("0.1", "12"), request_key("0.0", "1")}) == 4
    )


def test_a_batch_of_greedy_requests_is_left_to_vllm(vllm):
    engine = Engine(vllm, [0.0], [1])
    engine.runner.input_batch.sampling_metadata.all_greedy = True
    engine.step(None)
    assert engine.texts[0][-1] == int(logits_after([0] * PROMPT).argmax())


@pytest.mark.parametrize("name", ["_sample", "set_inputs_first_pass", "rejection_sample"])
def test_a_vllm_with_other_functions_is_refused(monkeypatch, name):
    stand_ins = vllm_v1.install(monkeypatch)
    gpu_runner = stand_ins.runner.__mro__[1]
    for owner in (gpu_runner, stand_ins.proposer, stand_ins.rejection):
        if hasattr(owner, name):
            monkeypatch.setattr(owner, name, lambda self, tokens: None)
    with pytest.raises(ConfigError, match=f"{name} .*use vLLM"):
        v1.patches(VllmSettings())


def test_with_match_the_drafts_stay_vllms(monkeypatch):
    vllm_v1.install(monkeypatch)
    replaced = {patch.name for patch in v1.patches(VllmSettings(drafts="match"))}
    assert "rejection_sample" in replaced
    assert "_sample_draft_tokens" not in replaced


# ---- the CPU path


def test_blocks_of_rows_compute_the_same_products_and_no_neighbour_matters():
    heights = []

    def product(x, weight, bias):
        heights.append(len(x))  # whole numbers: the order of sums does not matter
        return torch.nn.functional.linear(x, weight, bias) + len(x) - 8

    generator = torch.Generator().manual_seed(4)
    weight, x = (torch.randint(-9, 9, (n, 6), generator=generator).float() for n in (5, 19))
    blocks = v1_cpu.in_blocks(product, 8)
    whole = blocks(x, weight, None)
    assert set(heights) == {8}
    assert torch.equal(whole, x @ weight.T)
    for row in range(19):
        assert torch.equal(blocks(x[row : row + 1], weight, None)[0], whole[row])
    assert blocks(x[:6].view(2, 3, 6), weight, None).shape == (2, 3, 5)


def test_block_rows_reach_every_linear_layer_when_the_model_is_loaded(monkeypatch, caplog):
    stand_ins = vllm_v1.install(monkeypatch)
    for patch in v1.patches(VllmSettings(block_rows=8)):
        monkeypatch.setattr(patch.owner, patch.name, patch.replacement)
    runner = stand_ins.runner(None, "cpu")
    runner.load_model()
    linear = runner.model[0]
    x = torch.ones(3, 4)
    expected = torch.nn.functional.linear(x, linear.weight, linear.bias)
    assert torch.allclose(linear.cpu_linear(x, linear.weight, linear.bias), expected)
    assert linear.cpu_linear is not torch.nn.functional.linear
    assert "1 linear layers compute blocks of 8 rows" in caplog.text


def test_attributes_of_a_library_that_poses_as_an_object_are_none() -> None:
    """Numba's wrappers have a function in the place of their dictionary."""

    class Wrapper:
        __dict__ = len  # type: ignore[assignment]

    assert v1_cpu._attributes(Wrapper()) == {}
    assert v1_cpu._attributes(SimpleNamespace(kernel=1)) == {"kernel": 1}
