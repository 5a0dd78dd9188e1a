"""Chat templates: nothing of a chat is lost on the way to its text."""

import json
from datetime import datetime

import pytest

from longtail.errors import DataError
from longtail.model.hf.chat import ChatTemplate, conversation
from longtail.model.hf.tokenizer import load_tokenizer
from support.tiny_models import tiny_tokenizer

KNOWN = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<{{ m.role }}>"
    "{{ m.content | trim }}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}"
)
ANY = KNOWN.replace("m.role in ['system', 'user', 'assistant']", "true")
LAST_ONLY = "{{ messages[-1].content }}"
USER, SYSTEM = {"role": "user", "content": "hi"}, {"role": "system", "content": "Be brief."}
DEVELOPER, ANSWER = {**SYSTEM, "role": "developer"}, {"role": "assistant", "content": "Ho"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}
THOUGHT = "<think>\nhm\n</think>\n\nHo"
TOOL = {"type": "function", "function": {"name": "add", "description": "Add."}}


def template(source: str) -> ChatTemplate:
    return tiny_tokenizer(source).template


@pytest.mark.parametrize(
    ("source", "chat", "text"),
    [
        (KNOWN, [{"from": "human", "value": "hi"}], "<user>hi<eos><assistant>"),
        (ANY, [USER, {"role": "gpt", "content": "Ho"}, USER], "<user>hi<eos><assistant>Ho<eos>"),
        (KNOWN, [DEVELOPER, USER], "<system>Be brief.<eos><user>hi<eos>"),
        (ANY, [DEVELOPER, USER], "<developer>Be brief.<eos><user>hi<eos>"),
        (
            f"{{{{ raise_exception('no') if messages[0].role == 'developer' }}}}{KNOWN}",
            [DEVELOPER, USER],
            "<system>Be brief.<eos><user>hi<eos>",
        ),
    ],
)
def test_roles_have_other_names(source, chat, text):
    assert template(source).render(chat).startswith(text)


@pytest.mark.parametrize(
    ("source", "chat", "tools", "lost"),
    [
        (KNOWN, [{"role": "critic", "content": "Bad."}, USER], None, "role 'critic': 'Bad.'"),
        (LAST_ONLY, [USER, ANSWER, {**USER, "content": "bye"}], None, "role 'user': 'hi'"),
        (f"Ho{LAST_ONLY}", [USER, ANSWER, USER], None, "role 'assistant': 'Ho'"),
        (KNOWN, [USER, {"role": "tool", "content": "7"}], None, "role 'tool': '7'"),
        (KNOWN, [USER, CALL, USER], None, "the tool call 'add'"),
        (KNOWN, [USER], [TOOL], "the tool 'add'"),
        (LAST_ONLY, [SYSTEM, USER], None, "role 'system': 'Be brief.'"),
    ],
)
def test_a_template_that_leaves_something_out_is_refused(source, chat, tools, lost):
    with pytest.raises(DataError, match=f"tokenizer.chat_template leaves out .*{lost}"):
        template(source).render(chat, tools=tools)


@pytest.mark.parametrize(
    ("content", "chat", "tools"),
    [
        ("{{ m | tojson }}{{ tools | tojson }}", [USER, CALL, USER], [TOOL]),
        ("{{ m.content | tojson }}", [{**USER, "content": '"\n'}], None),
        (
            "{{ m.content.split('</think>')[-1] }}",
            [USER, {**ANSWER, "content": THOUGHT}, USER],
            None,
        ),
        ("{{ messages[1 - loop.index].content }}", [SYSTEM, USER], None),  # the system's at the end
        ("{{ m.content | trim }}", [{**USER, "content": "\n hi ", "tool_calls": []}], None),
    ],
)
def test_what_a_template_may_change_is_accepted(content, chat, tools):
    source = f"{{% for m in messages %}}{content}{{% endfor %}}"
    assert template(source).render(chat, tools=tools)


@pytest.mark.parametrize(
    ("opening", "begun", "text"),
    [
        ("", "Ho, ", "<assistant>Ho,"),
        ("<think>\n", "<think>\nWell", "<assistant><think>\nWell"),
        ("", "<think>\nWell", "<assistant><think>\nWell"),
        ("<think>\n\n</think>\n\n", "<think>\nWell", "<assistant><think>\nWell"),
    ],
)
def test_an_assistants_message_at_the_end_is_continued(opening, begun, text):
    source = KNOWN.replace("%}<assistant>", f"%}}<assistant>{opening}")
    source += "{# <think> #}"
    chat = [USER, {**ANSWER, "content": begun}]
    assert template(source).render(chat) == f"<user>hi<eos>{text}"
    assert template(source).render(chat, generation_prompt=False).endswith("<eos>")


def test_a_system_prompt_stands_before_messages_without_one_of_their_own():
    for chat, text in (([USER], "So."), ([SYSTEM, USER], "Be brief."), ([DEVELOPER], "Be brief.")):
        found = template(KNOWN).render(chat, system_prompt="So.")
        assert found.startswith(f"<system>{text}<eos>")
    with pytest.raises(DataError, match=r"data\.system_prompt = 'So\.': tokenizer\.chat_template"):
        template(LAST_ONLY).render([USER], system_prompt="So.")


@pytest.mark.parametrize("chat", [7, ["a"], [{"role": "user"}], [{**USER, "tool_calls": [{}]}]])
def test_what_is_no_chat_is_refused(chat):
    with pytest.raises(DataError, match=r"row 3: the prompt is .*, expected text or a list"):
        conversation(chat, where="row 3")


def test_arguments_of_calls_are_objects_though_clients_write_json():
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    (found,) = conversation([{**CALL, "tool_calls": [call, {"name": "f"}]}], where="")
    assert found["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_the_clock_of_a_run_is_what_the_template_writes():
    source = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}" + KNOWN
    text = template(source).render([USER], now=datetime(2024, 7, 26))
    assert text == "26 Jul 2024<user>hi<eos><assistant>"


@pytest.mark.parametrize(
    ("source", "needed"),
    [("{% for tool in tools %}{% endfor %}", "tools"), ("{{ functions + 'x' }}", "functions")],
)
def test_a_template_without_what_it_needs_is_refused_by_the_name_of_that(source, needed):
    with pytest.raises(DataError, match=rf"\(it reads {needed}, and none are given"):
        template(source + KNOWN).render([USER])


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{% for m in messages %}{% set x = m %}{{ x }}{{ loop.index }}{% endfor %}", ""),
        ("{% set x = 1 %}{{ x }}{% macro f(y) %}{{ x + y }}{% endmacro %}{{ f(2) }}", ""),
        ("{% if not day is defined %}{% set day = 'Monday' %}{% endif %}{{ day }}", "day"),
        ("{% if a %}{% set x = 1 %}{% else %}{% set x = 2 %}{% endif %}{{ x }}", "a"),
        ("{% if a %}{% set x = 1 %}{% endif %}{{ x }}", "a"),
        ("{% set tools = tools or [] %}{{ documents }}{{ range(3) }}", "documents tools"),
        ("{% macro f(y) %}{{ z }}{% endmacro %}", "z"),
        ("{% generation %}{{ a }}{% endgeneration %}{{ eos_token }}{{ tokenize }}", "a"),
        ("{% if %}", ""),
    ],
)
def test_arguments_are_variables_that_have_an_effect(source, names):
    assert template(source).arguments == set(names.split())


def test_of_named_templates_one_must_be_the_default_or_for_tools():
    named = tiny_tokenizer()
    named._inner.chat_template = {"tool_use": f"{{{{ tools | tojson }}}}{KNOWN}"}
    assert named.template.render([USER], tools=[TOOL]).startswith('[{"type": "function"')
    with pytest.raises(DataError, match="none of its templates, tool_use, is called default"):
        named.chat([USER])


def test_the_template_of_a_processor_is_read(tmp_path):
    tiny_tokenizer(None).save(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": KNOWN}))
    assert load_tokenizer(tmp_path).template.source == KNOWN
