"""Chat messages to one prompt text, by the model's own template.

Owns: the template and the sandbox it runs in.
Reads: a tokenizer's special tokens and template, `errors`.
Never: tokenises; lets a template touch files, the network or Python objects.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from oarlock.errors import ConfigError, InvalidParameter

if TYPE_CHECKING:
    from oarlock.frontend.tokenizer import Tokenizer
    from oarlock.model_summary import ModelSummary

MAX_RENDERED_CHARS = 16 << 20
MAX_RENDER_S = 10.0
# What `render` sets itself, from fields of the same names.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
_MARK = "\ue000continue-here\ue000 "  # private-use characters: no message holds them by accident. The space shows whether it is stripped


class TemplateError(Exception):
    """What a template's own `raise_exception` raises."""


class ChatTemplate:
    """A compiled template. `template_source` is its text, or named texts of which "default" and "tool_use" are known.

    Raises:
        ConfigError: the template is not valid Jinja.
    """

    def __init__(self, template_source: str | Mapping[str, str], tokenizer: Tokenizer | None) -> None:
        named = {"default": template_source} if isinstance(template_source, str) else dict(template_source)
        if not named:
            raise ConfigError("the model's list of chat templates is empty; give one with --chat-template", option="--chat-template")
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in named.items()}
        except jinja2.TemplateError as error:
            line = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ConfigError(f"the chat template is not valid Jinja{line}: {error}", option="--chat-template") from None
        self._special_tokens = dict(getattr(tokenizer, "special_tokens_map", None) or {})
        self.sources = named

    @cached_property
    def variables(self) -> frozenset[str]:
        """Every name that the template reads from outside; the keyword arguments of `render` that have an effect."""
        environment = _environment()
        return frozenset().union(*(jinja2.meta.find_undeclared_variables(environment.parse(text)) for text in self.sources.values()))

    @cached_property
    def takes_parts(self) -> bool:
        """Whether contents may be lists of parts: tried out. Other templates get the texts of the parts, joined by line breaks."""
        probe = [{"role": "user", "content": [{"type": "text", "text": _MARK}]}]
        try:
            text = self.render(probe, _flatten=False)
        except InvalidParameter:
            return False
        return _MARK.strip() in text and "'type'" not in text and '"type"' not in text

    @cached_property
    def takes_argument_text(self) -> bool:
        """Whether earlier calls' arguments must be JSON text: tried out. Most templates write the object themselves."""

        def shows(arguments: Any) -> bool:
            call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
            probe: list[dict[str, Any]] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
            try:
                return _MARK.strip() in self.render(probe, add_generation_prompt=False, _read_calls=False)
            except InvalidParameter:
                return False

        return not shows({"mark": _MARK}) and shows(json.dumps({"mark": _MARK}, ensure_ascii=False))

    def check_kwargs(self, names: Iterable[str]) -> None:
        """Raises InvalidParameter for variables that may not be set, or that the template never reads: setting them would do nothing."""
        for name in names:
            shown = str(name)[:100]
            if name in RESERVED:
                text = f"chat_template_kwargs cannot set {shown!r}; it has a field of its own."
            elif name not in self.variables:
                text = f"The chat template has no variable {shown!r}, so setting it would do nothing; leave it out."
            else:
                continue
            raise InvalidParameter(text, param=f"chat_template_kwargs.{shown}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt. Special tokens are part of the text: tokenise it without adding any.

        Raises:
            InvalidParameter: the template refuses these messages, or the result is too large; `param` is "messages".
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
                param="continue_final_message",
            )
        chat = [_checked(message, at) for at, message in enumerate(messages)]
        if kwargs.pop("_flatten", True) and any(isinstance(message.get("content"), list) for message in chat) and not self.takes_parts:
            for at, message in enumerate(chat):
                message["content"] = _joined(message.get("content"), f"messages[{at}].content")
        read_calls = kwargs.pop("_read_calls", True)
        for at, message in enumerate(chat):
            if read_calls and message.get("tool_calls") and not self.takes_argument_text:
                message["tool_calls"] = [_with_object(call, f"messages[{at}].tool_calls[{i}]") for i, call in enumerate(message["tool_calls"])]
        if continue_final_message:
            _mark_final(chat)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or next(iter(self._templates.values()))
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": chat,
            "tools": list(tools) if tools else None,
            "documents": kwargs.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = _render(template, variables)
        return _cut_at_mark(text) if continue_final_message else text


def load_chat_template(flag_value: str | None, tokenizer: Tokenizer | None, summary: ModelSummary) -> ChatTemplate | None:
    """The template that `--chat-template` gives (a file, the template itself, or the name of one of the model's), else the model's; None when there is none.

    Raises:
        ConfigError: the file cannot be read, or the template is not valid.
    """
    source = getattr(tokenizer, "chat_template", None)
    if flag_value and isinstance(source, Mapping) and flag_value in source:
        return ChatTemplate({"default": source[flag_value]}, tokenizer)
    if flag_value:
        return ChatTemplate(_from_flag(flag_value), tokenizer)
    return ChatTemplate(source, tokenizer) if source else None


def missing_template(model_name: str, remedy: str) -> InvalidParameter:
    """The error of a chat with a model that has no template. `remedy`: what to do about it in the place where it was asked."""
    return InvalidParameter(f"{model_name} has no chat template; {remedy}", param="messages")


def _from_flag(value: str) -> str:
    path = Path(value).expanduser()
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a template is often too long for a file name
        if not any(char in value for char in "{}\n"):
            raise ConfigError(f"--chat-template {value}: {error}", option="--chat-template") from None
    if not any(char in value for char in "{}\n"):
        raise ConfigError(f"--chat-template {value}: no such file, and not a template either (it has no braces)", option="--chat-template")
    return value.encode("latin-1", "backslashreplace").decode("unicode_escape") if "\\n" in value and "\n" not in value else value


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  as the base class declares it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Piece by piece, so that neither size nor time is without bound."""
    pieces, size, start = [], 0, time.monotonic()
    try:
        for piece in template.generate(variables):
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise InvalidParameter(
                    f"the chat template makes more than {MAX_RENDERED_CHARS} characters of these messages", param="messages"
                )
            if time.monotonic() - start > MAX_RENDER_S:
                raise InvalidParameter(f"the chat template took more than {MAX_RENDER_S:.0f} s for these messages", param="messages")
            pieces.append(piece)
    except TemplateError as error:
        raise InvalidParameter(f"the model's chat template refuses these messages: {error}", param="messages") from None
    except InvalidParameter:
        raise
    except Exception as error:  # noqa: BLE001  a template is code, and may do anything with these messages
        raise InvalidParameter(f"the model's chat template cannot render these messages: {error}", param="messages") from None
    return "".join(pieces)


def _checked(message: Mapping[str, Any], at: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidParameter(f"messages[{at}] must be an object with a role, got {message!r:.80}", param=f"messages[{at}]")
    return dict(message)


def _with_object(call: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """An earlier call, its arguments as an object instead of JSON text."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        path += ".function.arguments"
        raise InvalidParameter(f"{path} must be the JSON text of an object, as the call was answered; got {function['arguments']!r:.80}", param=path)
    return {**call, "function": {**function, "arguments": arguments}}


def _joined(content: Any, path: str) -> Any:
    """The texts of a list of parts, joined by line breaks; other contents as they are."""
    if not isinstance(content, list):
        return content
    for at, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidParameter(f'{path}[{at}] must be {{"type": "text", "text": ...}}, got {part!r:.80}', param=f"{path}[{at}]")
    return "\n".join(part["text"] for part in content)


def _mark_final(chat: list[dict[str, Any]]) -> None:
    """Put a mark at the end of the last message's text."""
    last = chat[-1] if chat else {}
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _MARK
        return
    if isinstance(content, list):
        for at in range(len(content) - 1, -1, -1):
            if isinstance(content[at], Mapping) and isinstance(content[at].get("text"), str):
                last["content"] = [*content[:at], {**content[at], "text": content[at]["text"] + _MARK}, *content[at + 1 :]]
                return
    raise InvalidParameter("continue_final_message needs a last message with text", param="messages")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_MARK.strip())
    if at < 0:
        raise InvalidParameter(
            "the chat template drops the end of the last message, so it cannot be continued", param="continue_final_message"
        )
    # A template that strips its messages took the mark's space with it, and would have taken the message's own.
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()
