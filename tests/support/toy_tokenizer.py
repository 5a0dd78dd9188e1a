"""The tokenizer of the tiny reasoner: whole words of its task, single digits, any ASCII.

A digit after a space is a token of its own, so a number is one token a digit and its first digit is
marked. Text round-trips exactly; a character beyond ASCII is `<unk>`. It writes Hugging Face files
with the `tokenizers` library; reading them back is `model.hf.tokenizer`'s business.
"""

import json
import re
from pathlib import Path

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from longtail.rl.data.tiny_task import PHRASES

PAD, EOS, UNKNOWN, USER, ASSISTANT = "<pad>", "<eos>", "<unk>", "<user>", "<assistant>"
THINK, END_OF_THINKING = "<think>", "</think>"
"""Ordinary tokens, so that they survive decoding: graders look for them."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{{ message['content'] }}<eos>"
    "{% else %}<user>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

_ASCII = ("\n", "\t", *(chr(code) for code in range(32, 127)))


def vocabulary() -> tuple[str, ...]:
    """Every token, in the order of its id."""
    words = {word for phrase in PHRASES for word in re.findall(r" ?[A-Za-z]+", phrase)}
    long_words = sorted(word for word in words if len(word) > 1)
    digits = [f" {digit}" for digit in range(10)]
    special = (PAD, EOS, UNKNOWN, USER, ASSISTANT, THINK, END_OF_THINKING)
    return (*special, *_ASCII, *digits, *long_words)


def _backend(tokens: tuple[str, ...]) -> Backend:
    backend = Backend(
        models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN)
    )
    words = [
        re.escape(token) for token in tokens if re.fullmatch(r" ?[A-Za-z]{2,}| [A-Za-z]", token)
    ]
    pattern = rf"(?:{'|'.join(words)})(?![A-Za-z])|{THINK}|{END_OF_THINKING}| [0-9]|[\s\S]"
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([PAD, EOS, UNKNOWN, USER, ASSISTANT])
    return backend


def write(directory: Path | str) -> None:
    """Write tokenizer.json and tokenizer_config.json, chat template included, into a directory."""
    directory = Path(directory)
    _backend(vocabulary()).save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
