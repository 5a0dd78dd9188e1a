"""Our conversion of GGUF files against the loader of transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longtail.model.hf.model import load_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.hf.weights import to_hf
from longtail.model.sources.gguf import convert
from support.gguf_files import VOCAB_SIZE, write_gguf
from support.tiny_models import tiny_model

TEXTS = ("abab ab  aabb", "é 🙂\n\n\tab<|end|> <user>x", "  12 121.5 abc's")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
@pytest.mark.filterwarnings("ignore")
def test_tensors_tokens_and_template_are_those_of_transformers(
    tmp_path: Path, family: str, kind: str
) -> None:
    heads = {"head_dim": 128} if family == "qwen3" else {}  # the only one that they read
    model = tiny_model(family, VOCAB_SIZE, intermediate_size=64, **heads)
    pre = "gpt-2" if family == "llama" else "qwen2"
    write_gguf(tmp_path / "tiny.gguf", model, kind=kind, pre=pre)
    convert(tmp_path / "tiny.gguf", tmp_path / "model", "model.path = 'tiny.gguf'")
    ours = load_model(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.bfloat16
    ).state_dict()
    for name, tensor in to_hf(ours.state_dict(), ours.config).items():
        assert torch.equal(tensor, theirs[name]), name
    tokenizer = load_tokenizer(tmp_path / "model")
    other = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    assert tokenizer.chat_template == other.chat_template
    for text in TEXTS:
        assert tokenizer.encode(text) == tuple(other.encode(text, add_special_tokens=False))
