"""A tokenizer like Qwen's, byte-level BPE trained here, against transformers' own reading of it."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from longtail.model.hf.tokenizer import load_tokenizer

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content "
    "+ '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "Let x = 12, then x's square is 144.",
    "  two  spaces\n\n\tand a tab , then a comma .",
    "na\u00efve caf\u00e9 \u2014 \u5b57 \U0001f600",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.add_special_tokens(SPECIAL)
    path = tmp_path_factory.mktemp("qwen")
    backend.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer", "chat_template": CHAT, "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "bos_token": None, "unk_token": None,
        "additional_special_tokens": SPECIAL[1:], "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return path


def test_tokens_and_text_are_those_of_transformers(directory: Path) -> None:
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        tokens = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == tuple(tokens)
        assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)


def test_the_chat_is_that_of_transformers(directory: Path) -> None:
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7?"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.template.render(messages) == text
    tokens = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.chat(messages) == tuple(tokens)
    assert ours.eos_ids == (theirs.eos_token_id,)
