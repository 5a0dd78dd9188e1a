"""Chat templates of released models: what longtail renders is what transformers renders."""

from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from longtail.errors import ConfigError, LongtailError
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.model.hf.turns import Turns
from longtail.rl.data.examples import make_examples
from longtail.rl.data.prompts import Encoder
from zoo.menagerie import ANSWER, CONVERSATIONS, TEMPLATES, USER, write_tokenizer

OTHERWISE = {
    *("apriel-1.6-15b-thinker", "deepseek-r1", "deepseek-r1-distill-llama-8b"),
    *("deepseek-r1-distill-qwen-32b", "deepseek-v3.2", "gemma-4-31b-it"),
    *("gemma-4-31b-it-interleaved", "glm-4.7-flash", "mirothinker", "nemotron-3-nano", "qwq-32b"),
}
"""Templates that do not write an answer behind the prompt of it."""
ENDLESS = {"rwkv-world"}
"""Templates that write no token behind an answer, so that the tokenizer's own is learned."""
REFUSED = {
    "gemma-2-2b-it": {"system": "not supported", "empty system": "not supported"},
    "mirothinker": dict.fromkeys(("turns", "prefill"), "cannot assign attribute"),
}
"""Conversations that a template refuses, with words of its reason."""


@pytest.fixture(scope="module", params=TEMPLATES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp(request.param) / request.param, request.param)


@pytest.fixture(scope="module")
def ours(path: Path) -> Tokenizer:
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def theirs(path: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(path)


def test_a_conversation_is_rendered_as_by_transformers_without_a_loss_or_refused_by_reason(
    path: Path, ours: Tokenizer, theirs: PreTrainedTokenizerFast
) -> None:
    for case, messages in CONVERSATIONS.items():
        is_begun = messages[-1]["role"] == "assistant"
        if reason := REFUSED.get(path.name, {}).get(case):
            with pytest.raises(LongtailError, match=f"chat_template refuses .*{reason}"):
                ours.template.render(messages)
            continue
        text = ours.template.render(messages)
        assert text == theirs.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not is_begun,
            continue_final_message=is_begun,
        ), case
        end = 0
        for message in messages:
            end = text.index(message["content"].strip(), end) + len(message["content"].strip())


def test_names_of_roles_in_data_are_known_and_no_role_is_left_out(
    path: Path, ours: Tokenizer
) -> None:
    turns = [
        {"from": "human", "value": USER["content"]},
        {"role": "gpt", "content": ANSWER["content"]},
        {"role": "human", "content": "And 5 + 6?"},
    ]
    if "turns" not in REFUSED.get(path.name, {}):
        assert ours.template.render(turns) == ours.template.render(CONVERSATIONS["turns"])
    for role in ("developer", "narrator"):
        try:
            text = ours.template.render([{"role": role, "content": "Answer in one word."}, USER])
        except LongtailError as error:
            text = str(error)
            assert "in one word" in text or "refuses messages with roles" in text
        else:
            assert "Answer in one word." in text


@pytest.mark.parametrize(
    "name", [name for name in TEMPLATES if "strftime_now" in TEMPLATES[name].read_text("utf-8")]
)
def test_a_template_writes_the_time_of_the_start_of_a_run_on_another_day(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, days = write_tokenizer(tmp_path / name, name), [datetime(2026, 1, day) for day in (8, 9)]
    inner, chat, theirs, ours = PreTrainedTokenizerFast.from_pretrained(path), [USER], [], []
    for day in days:
        clock = SimpleNamespace(now=lambda day=day: day)
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
        theirs.append(inner.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        render = Encoder.of(load_tokenizer(path), now=days[0]).render
        assert render is not None
        ours.append(render(chat))
    assert ours == [theirs[0]] * 2
    assert theirs[0] != theirs[1]


def test_a_target_is_the_turn_that_the_template_writes_or_it_is_said_how_it_differs(
    path: Path,
    ours: Tokenizer,
    theirs: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"messages": [USER, ANSWER]}]
    (example,), _ = make_examples(
        rows, source="x", encoder=Encoder.of(ours), ends=ours.ends, max_len=1 << 20
    )
    assert example.tokens[-1] in ours.eos_ids
    is_said = "the chat template does not write the answer" in capsys.readouterr().err
    assert is_said == (path.name in OTHERWISE)
    if not is_said:  # a template may write the end of a turn before the next one
        turns = [[USER, ANSWER], [USER, ANSWER, USER]]
        whole = [theirs.apply_chat_template(turn, tokenize=False) for turn in turns]
        tokens = example.tokens[:-1] if path.name in ENDLESS else example.tokens
        text = theirs.decode(tokens, clean_up_tokenization_spaces=False)
        assert any(each.startswith(text) for each in whole)


REWRITTEN = {
    *("kimi-k2-thinking", "nemotron-3-nano", "apriel-1.6-15b-thinker", "apriel-1.5-15b-thinker"),
    *("deepseek-r1-distill-llama-8b", "deepseek-r1-distill-qwen-32b", "deepseek-r1"),
    *("deepseek-v3.2", "functionary-medium-v3.2", "gemma-4-31b-it-interleaved", "gemma-4-31b-it"),
    *("glm-4.6", "glm-4.7-flash", "glm-5.2", "gpt-oss-120b", "qwen3.5-4b", "qwq-32b"),
    *("reka-edge", "rwkv-world", "step-3.5-flash"),
}
"""Templates that write an earlier answer otherwise than behind its prompt."""


def test_a_turn_follows_another_as_the_template_writes_it(path: Path, ours: Tokenizer) -> None:
    turns = Turns(ours, ours.template.render)
    if path.name == "mirothinker":
        with pytest.raises(ConfigError, match=r"environment\.name: no turn can follow"):
            turns.check(["user"])
        return
    turns.check(["user"])
    end = () if ours.ends.turn_id is None else (ours.ends.turn_id,)
    turn = (*ours.encode("It is 7.", goes_on=True), *end)
    observation = {"role": "user", "content": "Go on."}
    written = (*turns.prompt("How much?", [])[1], *turn, *turns.observed(turn, [observation]))
    answer = {"role": "assistant", "content": "It is 7."}
    whole = ours.encode(
        ours.template.render([{**USER, "content": "How much?"}, answer, observation])
    )
    assert (written == whole) == (path.name not in REWRITTEN)
    assert written[-8:] == whole[-8:]
