"""Tokenizers with the chat templates of released models (README.md), and conversations for them."""

import json
import re
from pathlib import Path
from typing import Any

from support.tiny_models import byte_level_backend

HERE = Path(__file__).parent
TEMPLATES = {path.stem: path for path in sorted(HERE.glob("*/*.jinja"))}
MODELS: dict[str, dict[str, Any]] = json.loads((HERE / "models.json").read_text("utf-8"))
"""Facts of each model: its name, its licence, and its tokens `bos` and `eos` (its own first)."""
_SPECIAL = re.compile(
    r"<\|[^<>|\s]+\|?>|<[^<>|\s]+\|>|<\uff5c[^<>\uff5c\s]+\uff5c>|\[/?[A-Z_]{3,25}\]"
    r"|<(?:seed:\w+|\w+_of_turn|sop|sep)>"
)

USER = {"role": "user", "content": "What is 3 + 4?"}
ANSWER = {"role": "assistant", "content": "Seven."}
CONVERSATIONS = {
    "user": [USER],
    "system": [{"role": "system", "content": "Answer in one word."}, USER],
    "turns": [USER, ANSWER, {"role": "user", "content": "And 5 + 6?"}],
    "unicode": [{"role": "user", "content": "Привет, 世界! 👩\u200d🚀 ½ \u202e"}],
    "spaces": [{"role": "user", "content": "  def f(x):\n    return x \n\n"}],
    "empty system": [{"role": "system", "content": ""}, USER],
    "prefill": [USER, {"role": "assistant", "content": "The sum is"}],
}


def write_tokenizer(path: Path, name: str) -> Path:
    """Write a vocabulary of bytes and of the template's special tokens, with the template."""
    path.mkdir()
    template, facts = TEMPLATES[name].read_text("utf-8"), MODELS[name]
    backend = byte_level_backend()
    named = [token for token in (facts["bos"], *facts["eos"]) if token is not None]
    backend.add_special_tokens([*dict.fromkeys([*_SPECIAL.findall(template), *named])])
    backend.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(template, "utf-8")
    tokens = {"bos_token": facts["bos"], "eos_token": facts["eos"][0]}
    (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    ends = {"eos_token_id": [backend.token_to_id(token) for token in facts["eos"]]}
    (path / "generation_config.json").write_text(json.dumps(ends))
    return path
