"""Transformers' modelling code behind the learner: scores and gradients are those of each text."""

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from longtail.config.rl import LearnerSection
from longtail.errors import ConfigError, UnsupportedModelError
from longtail.model.hf.causal import CausalModel, buckets, equal_decoder, read_pretrained
from longtail.model.hf.model import PolicyTransformer, save_model
from longtail.model.hf.weights import tensor_names
from longtail.model.size import count_parameters
from longtail.rl.learner import Learner
from longtail.rl.logprobs import score
from longtail.rl.packing import lay_out, share_prompts
from longtail.types import SamplingParams
from support.causal import FAMILIES, PROMPTS, TEXTS, batch, random_model
from support.tiny_models import tiny_model

NOT_PRODUCTS = {"gemma2", "granite", "cohere", "phi"}
TRUNCATED = SamplingParams(temperature=0.7, top_k=20)


@cache
def saved(root: Path, family: str) -> Path:
    save_model(tiny_model(family), root / family)
    return root / family


def pair(root: Path, family: str) -> tuple[PolicyTransformer, CausalModel]:
    """Our decoder and transformers' code with the same weights."""
    return tiny_model(family), CausalModel(read_pretrained(saved(root, family), torch.float32))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("causal")


def alone(model: PreTrainedModel, text: tuple[int, ...], first: int) -> Tensor:
    """Logprobs of a text's tokens from `first`, by all of the model's own logits."""
    logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    rows = torch.arange(first - 1, len(text) - 1)
    return logits.log_softmax(-1)[rows, torch.tensor(text[first:])]


@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared prompts"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_scores_and_gradients_are_those_of_our_decoder(root, family, shared):
    """Sums of some hundred terms of size 1, in another order and in float32."""
    texts = [(5, 9, 2, 7, *text) for text in TEXTS[:3]] + [TEXTS[3]]
    packed = lay_out(texts, [4, 4, 4, 1])
    if shared:
        packed = share_prompts(packed)
        assert packed.places is not None
    found = []
    for model in pair(root, family):
        model.trainable()
        model.fuse()
        scores = score(model, packed, TRUNCATED, max_logits=128 * 7)  # in chunks
        weight = torch.arange(len(scores.logprobs), dtype=torch.float32).cos()
        (scores.logprobs * weight).sum().backward()
        for parameter in model.parameters():  # published in the same names as the weights
            parameter.data = parameter.grad
        gradients = {name: tensor.clone() for name, tensor in model.published()}
        found.append((scores.logprobs.detach(), scores.entropy, gradients))
    ours, theirs = found
    assert float((ours[0] - theirs[0]).abs().max()) < 1e-5
    assert float((ours[1] - theirs[1]).abs().max()) < 1e-5
    assert ours[2].keys() == theirs[2].keys()
    for name, gradient in ours[2].items():
        gap = (gradient - theirs[2][name]).abs().max()
        assert float(gap) < 1e-5 * max(1.0, float(gradient.abs().max())), name


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_scores_each_text_as_its_own_logits_do(name):
    inner = random_model(name)
    model = CausalModel(inner)
    assert model.score_head().is_product == (name not in NOT_PRODUCTS)
    model.trainable()
    packed = lay_out(TEXTS, PROMPTS)
    expected = torch.cat([alone(inner, t, p) for t, p in zip(TEXTS, PROMPTS, strict=True)])
    torch.autograd.backward(-expected.sum())
    gradients = {n: p.grad for n, p in inner.named_parameters() if p.grad is not None}
    for recompute in (False, True):
        inner.zero_grad()
        scores = score(model, packed, SamplingParams(), recompute=recompute, max_logits=64 * 7)
        assert float((scores.logprobs - expected).detach().abs().max()) < 1e-4
        assert float(scores.logprobs.detach().std()) > 0.05
        torch.autograd.backward(-scores.logprobs.sum())
        for each, gradient in gradients.items():
            gap = (inner.get_parameter(each).grad - gradient).abs().max()
            assert float(gap) <= 1e-4 * (1 + float(gradient.abs().max())), each


@pytest.mark.parametrize(
    "name", ["gemma2", "phi", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]
)
def test_published_names_are_those_of_the_files_and_files_restore_every_weight(name, tmp_path):
    model = CausalModel(random_model(name))
    model.save(tmp_path, (1, 2))
    published = dict(model.published())
    kept = {each for each, _ in model.model.named_buffers()}
    assert tensor_names(tmp_path) - kept == published.keys()
    again = CausalModel(read_pretrained(tmp_path, torch.float32))
    for each, tensor in again.published():
        assert torch.equal(tensor, published[each]), each
    read = model.read(tmp_path)
    assert all(torch.equal(read[each], p) for each, p in model.trainable().items())
    assert again.model.generation_config.eos_token_id == [1, 2]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([10, 3, 9, 10], [[0, 3, 2], [1]]),
        ([100, 80, 90], [[0, 2, 1]]),
        ([100, 79, 90], [[0, 2], [1]]),
    ],
)
def test_buckets_have_little_padding(lengths, expected):
    assert buckets(lengths) == expected


def test_an_expert_that_no_token_reaches_is_updated_with_a_gradient_of_zero():
    """A layer of experts as older code has it: those without a token take no part in the pass."""
    inner = random_model("smollm3")
    idle = nn.Parameter(torch.ones(3))
    inner.model.layers[0].register_parameter("idle", idle)
    learner = Learner(CausalModel(inner), LearnerSection(learning_rate=0.1))
    before = {name: tensor.clone() for name, tensor in learner.learned().items()}
    learner.step([batch()])
    after = learner.learned()
    assert torch.equal(after["model.layers.0.idle"], before["model.layers.0.idle"])
    assert not torch.equal(after["model.norm.weight"], before["model.norm.weight"])


def test_the_size_of_a_foreign_model_is_known_without_its_weights(tmp_path):
    model = random_model("mixtral")
    model.config.save_pretrained(tmp_path)
    shape = equal_decoder(tmp_path)
    assert (shape.vocab_size, shape.max_positions) == (64, 128)
    assert count_parameters(shape) == pytest.approx(model.num_parameters(), rel=0.01)


def test_what_cannot_be_opened_is_refused_by_one_sentence(tmp_path):
    model = random_model("olmo2")
    model.config.quantization_config = {"quant_method": "mxfp4"}
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="quantization_config is set"):
        CausalModel(read_pretrained(tmp_path, torch.float32))
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ConfigError, match="transformers cannot open it"):
        CausalModel(read_pretrained(tmp_path, torch.float32))


def test_logits_that_the_head_does_not_give_are_refused(monkeypatch):
    inner = random_model("olmo2")
    forward = type(inner).forward

    def shifted(self, input_ids=None, **more):
        found = forward(self, input_ids=input_ids, **more)
        if input_ids is not None:
            found.logits = found.logits + F.one_hot(input_ids, 64)
        return found

    monkeypatch.setattr(type(inner), "forward", shifted)
    with pytest.raises(UnsupportedModelError, match="its logits are not those of its last hidden"):
        CausalModel(inner)
