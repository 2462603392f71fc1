"""`suffix`: a prompt of a model that fills gaps, by its own special tokens; and the two ends at which a prompt may be cut."""

from __future__ import annotations

from typing import Any

import pytest
from toy_frontend import SPECIALS, ToyTokenizer, says
from toy_server import MODEL, events, refused, strict, toy_server

pytestmark = pytest.mark.asyncio
FORMS: dict[str, tuple[tuple[str, ...], str]] = {
    "qwen": (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "0{prompt}1{suffix}2"),
    "starcoder": (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "0{prompt}1{suffix}2"),
    "deepseek": (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "0{prompt}1{suffix}2"),
    "codellama": (("▁<PRE>", "▁<SUF>", "▁<MID>"), "0{prompt}1{suffix}2"),
    "codestral": (("[PREFIX]", "[SUFFIX]"), "1{suffix}0{prompt}"),
}
FIRST = 266  # id of a form's first token


class FillTokenizer(ToyTokenizer):
    """Knows the tokens of one form; some tokenizers put a space before the first word of a text."""

    def __init__(self, tokens: tuple[str, ...], *, adds_bos: bool = False, adds_space: bool = False) -> None:
        super().__init__(adds_bos=adds_bos)
        self._tokens, self._adds_space = tokens, adds_space

    def token_to_id(self, token: str) -> int | None:
        return FIRST + self._tokens.index(token) if token in self._tokens else super().token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode((" " if self._adds_space else "") + text, add_special_tokens)


def shown(ids: Any) -> str:
    """Tokens of the form by their number."""
    return "".join(str(i - FIRST) if i >= FIRST else SPECIALS.get(i) or chr(i) for i in ids)


async def fill(here: Any, **fields: Any) -> Any:
    return await here.http.post("/v1/completions", json={"model": MODEL, "prompt": "def f", "suffix": "end", **fields})


@pytest.mark.parametrize("name", FORMS)
async def test_the_gap_is_marked_as_the_model_was_trained(name: str) -> None:
    tokens, form = FORMS[name]
    async with toy_server(says("body"), tokenizer=FillTokenizer(tokens)) as here:
        answer = strict((await fill(here)).text)
        assert answer["choices"][0]["text"] == "body" and answer["usage"]["prompt_tokens"] == 8 + len(tokens)
        assert shown(here.engine.submitted[-1].prompt_token_ids) == form.format(prompt="def f", suffix="end")
        assert "".join(c["text"] for e in events(await fill(here, stream=True)) if e != "[DONE]" for c in e["choices"]) == "body"
        await fill(here, prompt=["axb", ""])
        await fill(here, prompt=[5, 6])
        assert [shown(r.prompt_token_ids) for r in here.engine.submitted[-3:]] == [form.format(prompt=p, suffix="end") for p in ("axb", "", "\x05\x06")]
        rendered = strict((await here.http.post("/v1/completions/render", json={"model": MODEL, "prompt": "x", "suffix": "y"})).text)
        assert shown(rendered[0]["token_ids"]) == form.format(prompt="x", suffix="y") and rendered[0]["prompt"] == "x"


async def test_what_the_tokenizer_adds_stays_at_the_beginning_and_out_of_the_suffix() -> None:
    tokens, _ = FORMS["codellama"]
    async with toy_server(tokenizer=FillTokenizer(tokens, adds_bos=True, adds_space=True)) as here:
        await fill(here)
        assert shown(here.engine.submitted[-1].prompt_token_ids) == "<bos>0 def f1end2"
        await fill(here, add_special_tokens=False)
        assert shown(here.engine.submitted[-1].prompt_token_ids) == "0 def f1end2"


async def test_no_gap_without_its_tokens() -> None:
    async with toy_server() as here:
        assert "<|fim_prefix|>" in refused(await fill(here), "suffix")["message"]
        assert (await fill(here, suffix="")).status_code == 200
        assert (await fill(here, suffix=None)).status_code == 200
        refused(await fill(here, suffix=5), "suffix")
    async with toy_server(tokenizer=FillTokenizer(FORMS["qwen"][0])) as here:
        refused(await fill(here, truncate_prompt_tokens=5), "suffix")
        refused(await fill(here, suffix="x" * 5000), "suffix")
        refused(await fill(here, prompt="x" * 5000), "prompt")
        refused(await fill(here, prompt="x" * 60), "prompt")
        echoed = strict((await fill(here, echo=True, max_tokens=2)).text)
        assert echoed["choices"][0]["text"].startswith("def f")
        assert not here.engine.open


async def test_a_prompt_is_cut_at_the_end_that_is_asked_for() -> None:
    async with toy_server() as here:
        for fields, kept in (
            ({"truncate_prompt_tokens": 3}, "789"), ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "123"), ({"truncation_side": "right"}, "123456789"),
            ({"truncate_prompt_tokens": -1}, "123456789"),
        ):  # fmt: skip
            response = await here.completion(prompt="123456789", max_tokens=4, **fields)
            assert response.status_code == 200 and bytes(here.engine.submitted[-1].prompt_token_ids).decode() == kept
        await here.completion(prompt="x" * 100, max_tokens=4, truncate_prompt_tokens=-1)
        assert len(here.engine.submitted[-1].prompt_token_ids) == 60
        await here.chat(messages=[{"role": "user", "content": "y" * 100}], truncate_prompt_tokens=-1, truncation_side="right")
        assert bytes(here.engine.submitted[-1].prompt_token_ids).startswith(b"[user]yyy") and len(here.engine.submitted[-1].prompt_token_ids) == 63
        refused(await here.completion(truncation_side="middle"), "truncation_side")
        refused(await here.completion(truncate_prompt_tokens=-2), "truncate_prompt_tokens")
