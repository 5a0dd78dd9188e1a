"""Chat templates of released models: what longtail renders is what transformers renders."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from longtail.errors import LongtailError
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.rl.data.prompts import Encoder
from zoo.menagerie import ANSWER, CONVERSATIONS, HERE, TEMPLATES, USER, write_tokenizer

REFUSED = {
    "gemma-2-2b-it": {"system": "not supported", "empty system": "not supported"},
    "mirothinker": dict.fromkeys(("turns", "prefill"), "cannot assign attribute"),
}
"""Conversations that a template refuses, with words of its reason."""


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_rendered_as_by_transformers_without_a_loss_or_refused_by_reason(
    name: str, tmp_path: Path
) -> None:
    path = write_tokenizer(tmp_path, name)
    ours, theirs = load_tokenizer(path), PreTrainedTokenizerFast.from_pretrained(path)
    encoder = Encoder.of(ours)
    for case, messages in CONVERSATIONS.items():
        is_begun = messages[-1]["role"] == "assistant"
        if reason := REFUSED.get(name, {}).get(case):
            with pytest.raises(LongtailError, match=f"chat_template refuses .*{reason}"):
                encoder.render(messages)
            continue
        text = encoder.render(messages)
        assert text == theirs.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not is_begun,
            continue_final_message=is_begun,
        ), case
        end = 0
        for message in messages:
            end = text.index(message["content"].strip(), end) + len(message["content"].strip())


def test_templates_of_other_licences_are_rewritten_from_what_they_render(tmp_path: Path) -> None:
    facts: dict[str, dict[str, Any]] = json.loads((HERE / "rendered.json").read_text("utf-8"))
    cases = {**CONVERSATIONS, "answered": [USER, {**ANSWER, "content": " Seven. "}]}
    for name, texts in facts.items():
        inner = PreTrainedTokenizerFast.from_pretrained(write_tokenizer(tmp_path, name))
        for case, text in texts.items():
            if text is not None:
                assert text == inner.apply_chat_template(
                    cases[case],
                    tokenize=False,
                    add_generation_prompt=case != "answered",
                    date_string="26 Jul 2024",
                ), (name, case)
