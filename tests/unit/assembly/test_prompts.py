"""Prompts of a run, from its configuration and a tokenizer."""

import pytest

from end_to_end.workshop import Workshop, write_lines
from longtail.assembly.prompts import load_prompts
from longtail.config.rl import load
from longtail.errors import ConfigError
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.rl.data.prompts import HeldOut

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}(no thinking){% endif %}"
    "{% if note %}{{ note.text }}{% endif %}"
)


def _load(workshop: Workshop, *words: str, template: str | None = TEMPLATE) -> HeldOut:
    tokenizer = load_tokenizer(workshop.model)
    tokenizer._inner.chat_template = template
    config = load(None, workshop.words("run", *words)[1:])
    return load_prompts(config, tokenizer, lambda rows: [None] * len(rows))


def test_arguments_and_a_system_prompt_reach_the_chat_template(workshop):
    prompts = _load(
        workshop,
        "--data.system_prompt=Be brief.",
        "--data.chat_template_kwargs={enable_thinking = false, note = {text = '!'}}",
    )
    first, *_ = prompts.train.prompts
    assert first.text == "<system>Be brief.<user>say 0(no thinking)!"
    assert prompts.heldout.prompts[-1].text.startswith("<system>Be brief.<user>say 11")


def test_an_argument_that_the_template_does_not_read_is_refused(workshop):
    message = r"data\.chat_template_kwargs\.thinking: .*it reads enable_thinking, note$"
    with pytest.raises(ConfigError, match=message):
        _load(workshop, "--data.chat_template_kwargs={thinking = false}")


@pytest.mark.parametrize("name", ["messages", "tokenize", "chat_template", "eos_token"])
def test_what_the_system_gives_to_a_template_cannot_be_set(workshop, name):
    template = f"{TEMPLATE}{{{{ {name} }}}}"
    with pytest.raises(ConfigError, match=rf"data\.chat_template_kwargs\.{name}: "):
        _load(workshop, f"--data.chat_template_kwargs={{{name} = 'x'}}", template=template)


@pytest.mark.parametrize(
    ("word", "template", "message"),
    [
        ("--data.system_prompt=Be brief.", None, r"^data\.\w+ = .*has no chat template"),
        ("--data.chat_template_kwargs={a = 1}", None, r"^data\.\w+ = .*has no chat template"),
        (
            "--data.system_prompt=Be brief.",
            "{{ messages[-1].content }}",
            r"data\.system_prompt = 'Be brief\.'",
        ),
    ],
)
def test_what_the_template_cannot_take_is_refused(workshop, word, template, message):
    with pytest.raises(ConfigError, match=message):
        _load(workshop, word, template=template)


def test_what_is_left_out_is_said(workshop, tmp_path):
    source = tmp_path / "rows.jsonl"
    write_lines(
        source, *({"prompt": f"say {index}", "answer": f"{index}"} for index in range(8, 12))
    )
    words = (f"--data.source={source}", "--data.max_prompt_len=8", "--data.heldout_size=0")
    drop = ("--data.drop_long_prompts=true", "--data.drop_ungradable=true", "--reward.name=exact")
    config = load(None, workshop.words("run", *words, *drop)[1:])
    said = list[str]()
    tokenizer = load_tokenizer(workshop.model)
    load_prompts(config, tokenizer, lambda rows: ["none", *[None] * (len(rows) - 1)], said.append)
    assert said == [
        f"{source}: 2 prompts over 8 tokens are left out (data.drop_long_prompts)",
        f"{source}: 1 prompts are left out (data.drop_ungradable)",
    ]
