"""llama.cpp's cases of tokenization: a vocabulary of a GGUF file yields its ids, or is refused."""

import json
from pathlib import Path

import pytest

from longtail.errors import ConfigError
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.sources.gguf import convert
from support.gguf_files import write_gguf
from support.tiny_models import tiny_model
from zoo.menagerie import HERE

pytest.importorskip("transformers", minversion="5.23")  # older ones convert tokenizers wrongly
VOCABULARIES = sorted((HERE / "vocabularies").glob("*.json"))
READ = ("gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2")
"""Vocabularies that are read; the others are refused."""
_BETWEEN = "\n__ggml_vocab_test__\n"
CASES = (HERE / "vocabularies" / "cases.inp").read_text("utf-8").split(_BETWEEN)


@pytest.mark.parametrize(
    ("file", "kind"),
    [*((file, None) for file in VOCABULARIES), (HERE / "vocabularies" / "refact.json", "smollm")],
    ids=lambda each: each.stem if isinstance(each, Path) else each,
)
def test_the_ids_of_a_vocabulary_are_those_of_llama_cpp_or_it_is_refused_by_name(
    file: Path, kind: str | None, tmp_path: Path
) -> None:
    """The kind of SmolLM2, of which there is no vocabulary here, splits as that of Refact does."""
    words = json.loads(file.read_text("utf-8"))
    ids = words.pop("ids")
    words["pre"] = kind or words["pre"]
    model = tiny_model("llama", len(ids))
    write_gguf(tmp_path / "words.gguf", model, words=words)
    if kind is None and file.stem not in READ:
        with pytest.raises(ConfigError, match=f"'{words['pre']}'"):
            convert(tmp_path / "words.gguf", tmp_path / "model", "model.path", print)
        return
    convert(tmp_path / "words.gguf", tmp_path / "model", "model.path", print)
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer.vocab_size == len(ids)
    expected = file.with_suffix(".out").read_text("utf-8").split("\n")
    found = {case: " ".join(str(ids[token]) for token in tokenizer.encode(case)) for case in CASES}
    assert found == {case: line.strip() for case, line in zip(CASES, expected, strict=True)}
    begins = words.get("add_bos_token", words["pre"] == "llama-bpe")
    first = (words["bos_token_id"],) if begins else ()
    assert tokenizer.encode("a", add_special_tokens=True)[:-1] == first
