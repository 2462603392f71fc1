"""Chat templates: what they see, what they may not do, and what their faults become."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from oarlock.errors import ConfigError, InvalidParameter
from oarlock.frontend import chat
from oarlock.frontend.chat import ChatTemplate, load_chat_template, missing_template
from oarlock.model_summary import ModelSummary

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m['content'] + '' }}</{{ m.role }}>\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}<assistant>{% endif %}"
PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
USER = [{"role": "user", "content": "hi"}]
SUMMARY = ModelSummary("m", "LlamaForCausalLM")


def template(source: Any, **special: str) -> ChatTemplate:
    return ChatTemplate(source, SimpleNamespace(special_tokens_map=special, chat_template=None))  # type: ignore[arg-type]


def test_renders_messages_and_the_generation_prompt() -> None:
    assert template(PLAIN).render(USER) == "<user>hi</user>\n<assistant>"
    assert template(PLAIN).render(USER, add_generation_prompt=False) == "<user>hi</user>\n"


def test_the_template_sees_special_tokens_tools_and_keyword_arguments() -> None:
    source = "{{ bos_token }}|{{ tools | tojson }}|{{ thinking }}|{{ messages | length }}"
    tools = [{"type": "function", "function": {"name": "é<b>"}}]
    got = template(source, bos_token="<s>").render(USER, tools=tools, thinking=True)
    assert got == '<s>|[{"type": "function", "function": {"name": "é<b>"}}]|True|1'
    assert template(source).variables == {"bos_token", "tools", "thinking", "messages"}


def call(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [*USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "call12345", "type": "function", "function": function}]}]


CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (CALLS + "{{ c.function.arguments | tojson }}" + END, '{"city": "Köln", "n": 1}'),  # as most templates do
        (CALLS + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}" + END, "city=Köln;n=1;"),
        (CALLS + "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}" + END,
         '{"city": "Köln", "n": 1}'),
        (CALLS + "{{ 'x' + c.function.arguments + 'x' }}" + END, 'x{"city":"Köln","n":1}x'),  # it wants the text
        (CALLS + "{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}{{ c.function | tojson }}" + END,
         '{"name": "f", "arguments": {"city": "Köln", "n": 1}}'),
    ],
)  # fmt: skip
def test_the_arguments_of_earlier_calls_come_in_the_form_that_the_template_takes(source: str, shown: str) -> None:
    made = template(source)
    assert made.render(call('{"city":"Köln","n":1}')) == shown
    assert made.render(call("")) in ("{}", "", "xx", '{"name": "f", "arguments": {}}')
    assert made.render(USER) == ""


def test_arguments_that_are_no_object_are_laid_to_their_place() -> None:
    made = template(CALLS + "{{ c.function.arguments | tojson }}" + END)
    for wrong in ("{", "[1]", "5", "[" * 100_000):
        with pytest.raises(InvalidParameter) as caught:
            made.render(call(wrong))
        assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


def test_no_tools_means_none() -> None:
    assert template("{{ tools is none }}").render(USER, tools=[]) == "True"


def test_blocks_are_trimmed_as_templates_expect() -> None:
    assert template("  {% if true %}\nx\n  {% endif %}\ny").render(USER) == "x\ny"


def test_loop_controls_and_generation_marks_work() -> None:
    assert template("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}").render(USER) == "1"
    assert template("{% generation %}a{{ messages[0].content }}{% endgeneration %}b").render(USER) == "ahib"


def test_strftime_now_gives_the_date() -> None:
    assert re.fullmatch(r"\d{4}-\d\d", template("{{ strftime_now('%Y-%m') }}").render(USER))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "cannot render these messages"),
        ("{{ ''.__class__.__mro__ }}", "cannot render these messages"),
        ("{{ messages.append(1) }}", "cannot render these messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot render these messages"),
        ("{{ nothing.at.all }}", "cannot render these messages"),
    ],
)
def test_a_fault_of_the_template_is_the_requests(source: str, words: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(words)) as caught:
        template(source).render(USER)
    assert caught.value.param == "messages"


def test_rendering_is_bounded_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(InvalidParameter, match="more than 1000 characters"):
        template("{% for i in range(99999) %}aaaa{% endfor %}").render(USER)


def test_rendering_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDER_S", 0.0)
    with pytest.raises(InvalidParameter, match="took more than"):
        template("{% for i in range(99999) %}{{ i }}{% endfor %}").render(USER)


def test_text_parts_are_joined_for_templates_that_want_text() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert template(PLAIN).render(messages) == "<user>a\nb</user>\n<assistant>"
    assert template(PARTS).render(messages) == "[a][b]"
    assert template("{{ messages[0].content }}").render(messages) == "a\nb"


def test_other_parts_are_refused_by_their_path() -> None:
    messages = [
        *USER,
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "http://x"}}]},
    ]
    with pytest.raises(InvalidParameter) as caught:
        template(PLAIN).render(messages)
    assert caught.value.param == "messages[1].content[1]"


@pytest.mark.parametrize("message", [{"content": "no role"}, "text", {"role": 3, "content": "x"}])
def test_a_message_without_a_role_is_refused(message: Any) -> None:
    with pytest.raises(InvalidParameter, match="must be an object with a role"):
        template(PLAIN).render([message])


def test_the_callers_messages_are_left_alone() -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
    template(PLAIN).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (PLAIN, "so far ", "<user>hi</user>\n<assistant>so far "),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}", "so far ", "<user>hi</><assistant>so far"),
        (PARTS.replace("[", "").replace("]", ""), [{"type": "text", "text": "so far"}], "so far"),
    ],
)
def test_the_last_message_can_be_continued(source: str, content: Any, expected: str) -> None:
    messages = [*([] if source.startswith(PARTS[:40]) and "p.text" in source else USER), {"role": "assistant", "content": content}]
    assert template(source).render(messages, add_generation_prompt=False, continue_final_message=True) == expected


def test_continuing_needs_text_and_no_generation_prompt() -> None:
    with pytest.raises(InvalidParameter, match="exclude each other"):
        template(PLAIN).render(USER, continue_final_message=True)
    with pytest.raises(InvalidParameter, match="needs a last message with text"):
        template(PLAIN).render([{"role": "assistant", "content": None}], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidParameter, match="drops the end"):
        template("{{ messages[0].role }}").render(USER, add_generation_prompt=False, continue_final_message=True)


def test_named_templates() -> None:
    named = template({"default": "plain", "tool_use": "with tools"})
    assert named.render(USER) == "plain"
    assert named.render(USER, tools=[{}]) == "with tools"


def test_the_flag_takes_a_file_or_a_template(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("from the file: {{ messages[0].content }}")
    for given, expected in ((str(file), "from the file: hi"), ("inline {{ messages[0].content }}", "inline hi")):
        loaded = load_chat_template(given, None, SUMMARY)
        assert loaded is not None and loaded.render(USER) == expected


def test_a_one_line_template_may_write_line_breaks_as_escapes() -> None:
    loaded = load_chat_template("{{ messages[0].content }}\\né", None, SUMMARY)
    assert loaded is not None and loaded.render(USER) == "hi\né"


def test_a_path_that_does_not_exist_is_an_error_and_not_a_template() -> None:
    with pytest.raises(ConfigError, match=r"--chat-template \./chatml\.jinja: no such file") as caught:
        load_chat_template("./chatml.jinja", None, SUMMARY)
    assert caught.value.option == "--chat-template"


def test_a_broken_template_names_the_line() -> None:
    with pytest.raises(ConfigError, match="not valid Jinja at line 2"):
        template("ok\n{% if %}")


def test_a_model_without_template_has_none_and_the_error_says_what_to_do() -> None:
    assert load_chat_template(None, SimpleNamespace(chat_template=None), SUMMARY) is None  # type: ignore[arg-type]
    error = missing_template("gemma", "give one")
    assert str(error) == "gemma has no chat template; give one" and error.param == "messages"


def test_a_template_of_the_checkpoint_is_chosen_by_its_name() -> None:
    named = {"default": "plain", "rag": "{% for m in messages %}<{{ m.content }}>{% endfor %}"}
    tokenizer: Any = SimpleNamespace(special_tokens_map={}, chat_template=named)
    chosen = load_chat_template("rag", tokenizer, SUMMARY)
    assert chosen is not None and chosen.render(USER) == "<hi>"
    with pytest.raises(ConfigError, match="no such file"):
        load_chat_template("other", tokenizer, SUMMARY)
