"""`suffix` of a completion: the prompt of a model that was trained to fill a gap.

Owns: which special tokens mark the gap, and the order of the parts.
Reads: the tokenizer's special tokens.
Never: guesses for a model whose tokenizer has no such tokens.

Source: Efficient Training of Language Models to Fill in the Middle, Bavarian et al. 2022, arXiv:2207.14255, section 3.

    Qwen2.5-Coder, StarCoder, CodeGemma   PREFIX text SUFFIX suffix MIDDLE
    DeepSeek-Coder                        BEGIN text HOLE suffix END
    Code Llama                            PRE text SUF suffix MID
    Codestral                             SUFFIX suffix PREFIX text
"""

from __future__ import annotations

from typing import Any

from oarlock.frontend.inputs import InputProcessor
from oarlock.server.errors import bad

# Each line: the parts in order, "{prompt}" and "{suffix}" among the tokens.
_FORMS: tuple[tuple[str, ...], ...] = (
    ("<|fim_prefix|>", "{prompt}", "<|fim_suffix|>", "{suffix}", "<|fim_middle|>"),
    ("<fim_prefix>", "{prompt}", "<fim_suffix>", "{suffix}", "<fim_middle>"),
    ("<fim-prefix>", "{prompt}", "<fim-suffix>", "{suffix}", "<fim-middle>"),
    ("<｜fim▁begin｜>", "{prompt}", "<｜fim▁hole｜>", "{suffix}", "<｜fim▁end｜>"),
    ("▁<PRE>", "{prompt}", "▁<SUF>", "{suffix}", "▁<MID>"),
    ("[SUFFIX]", "{suffix}", "[PREFIX]", "{prompt}"),
)  # fmt: skip
_MARK = "☺"  # no word begins with it


def fill_in_ids(processor: InputProcessor, prompt: Any, suffix: str, *, add_special_tokens: bool) -> list[int]:
    """The prompt's token ids around the gap. Raises ApiError 400 for a model without such tokens, RequestError naming prompt or suffix."""
    tokenizer: Any = processor.tokenizer
    form = None if tokenizer is None else next((f for f in _FORMS if all(p[0] == "{" or tokenizer.token_to_id(p) is not None for p in f)), None)
    if form is None:
        text = "suffix needs a model whose tokenizer has fill-in-the-middle tokens, such as <|fim_prefix|>, and this one's has none; leave it out."
        raise bad("suffix", text, "unsupported_field")
    ids: list[int] = _beginning(tokenizer) if add_special_tokens else []
    for part in form:
        if part == "{prompt}":
            ids += processor.tokenize(prompt, add_special_tokens=False) if prompt and type(prompt) is str else list(prompt)
        elif part == "{suffix}":
            ids += _inner(processor, suffix)
        else:
            ids.append(tokenizer.token_to_id(part))
    return ids


def _inner(processor: InputProcessor, suffix: str) -> list[int]:
    """The suffix as it stands inside a text: some tokenizers put a space before the first word of one."""
    mark = processor.tokenize(_MARK, add_special_tokens=False, param="suffix")
    ids = processor.tokenize(_MARK + suffix, add_special_tokens=False, param="suffix")
    return ids[len(mark) :] if ids[: len(mark)] == mark else processor.tokenize(suffix, add_special_tokens=False, param="suffix")


def _beginning(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text."""
    plain, whole = (tokenizer.encode("a", add) for add in (False, True))
    return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(plain)] == plain), [])
