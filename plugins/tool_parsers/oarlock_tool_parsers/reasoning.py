"""Reasoning between two marks at the beginning of an answer: <think>...</think>, [THINK]...[/THINK].

Owns: where it begins and ends. The prompt may have begun it, or ruled it out.
Reads: `reading`.
Never: looks for reasoning after the first text of the answer.
"""

from __future__ import annotations

from typing import ClassVar

from oarlock_tool_parsers.reading import SPACE, Read, StreamParser


class Thought(StreamParser):
    """White space around the marks belongs to neither side. Without the closing mark everything is reasoning."""

    opening: ClassVar[str] = "<think>"
    closing: ClassVar[str] = "</think>"
    special_tokens = ("<think>", "</think>")
    is_certain: ClassVar[bool] = False  # the model reasons unless the prompt has ended its reasoning, whether or not the mark comes

    def read(self) -> Read[None]:
        prompt = self.context.prompt_end.rstrip()
        if prompt.endswith(self.closing):
            return
        space = yield from self.space()
        if not (yield from self.literal(self.opening)) and not self.is_certain and not prompt.endswith(self.opening):
            self.content(space)
            return
        yield from self.space()
        self._waiting = ""
        yield from self.until((self.closing,), self._thought)
        yield from self.space()

    def _thought(self, text: str) -> None:
        text = self._waiting + text
        shown = text.rstrip(SPACE)
        self._waiting = text[len(shown) :]
        self.reasoning(shown)


class DeepSeekR1(Thought):
    is_certain = True


class Qwen3(Thought):
    pass


class MistralThink(Thought):
    opening, closing = "[THINK]", "[/THINK]"
    special_tokens = ("[THINK]", "[/THINK]")
