"""Calls of tools in texts, in the formats of chat templates."""

import pytest

from longtail.errors import ConfigError
from longtail.rl.environments.calls import format_of, parse
from zoo.menagerie import TEMPLATES

FORMATS = {
    "hermes": "qwen2.5-7b-instruct qwen3-0.6b qwq-32b mimo-vl-7b mirothinker bielik-11b-v3.0-instruct",  # noqa: E501
    "qwen3-coder": "qwen3-coder qwen3.5-4b step-3.5-flash seed-oss-36b-instruct",
}
LLAMA = 'in the format {"name": function name, "parameters": dictionary of argument name and value}'


def test_templates_of_released_models_have_the_format_that_they_ask_for():
    known = {model: name for name, models in FORMATS.items() for model in models.split()}
    sources = {model: path.read_text("utf-8") for model, path in TEMPLATES.items()}
    assert {model: format_of(sources[model]) for model in known} == known
    assert format_of(LLAMA) == "llama3"
    for model in sources.keys() - known:
        with pytest.raises(ConfigError, match=r"^tokenizer\.chat_template: .*, hermes, llama3; "):
            format_of(sources[model])


F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g", "parameters": {}}'
TWO_LINES = "<parameter=a>\n1\n2\n</parameter>"


@pytest.mark.parametrize(
    ("format", "text", "calls"),
    [
        ("hermes", "no call", []),
        ("hermes", f"<think><tool_call>{F}</tool_call></think>4", []),
        ("hermes", f"so <tool_call>\n{F}\n</tool_call><tool_call>{G}", ["f {'a': 1}", "g {}"]),
        ("hermes", "<tool_call>[1]</tool_call>", ["unknown {} The call has no name."]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', ["f {}"]),
        ("hermes", f"<tool_call>{F[:-1]}</tool_call>", ["unknown {} The call is not valid JSON"]),
        ("hermes", F, []),
        (
            "qwen3-coder",
            f"<tool_call>\n<function=f>\n{TWO_LINES}\n</function>",
            ["f {'a': '1\\n2'}"],
        ),
        ("qwen3-coder", "<function=f>1</function>", ["f {} The call holds more than parameters."]),
        ("qwen3-coder", "<tool_call>f", ["unknown {} The call has no <function=name>."]),
        ("llama3", f"<|python_tag|>{F}; {G}", ["f {'a': 1}", "g {}"]),
        ("llama3", "<|python_tag|>print()", ["unknown {} The call is not valid JSON"]),
        ("llama3", G, ["g {}"]),
        ("llama3", '{"result": 1}', []),
    ],
)
def test_calls_of_a_text_are_read_and_bad_ones_say_why(format, text, calls):
    read = [f"{each.name} {each.arguments} {each.error}".strip() for each in parse(text, format)]
    assert [each.partition(" (")[0] for each in read] == calls
