"""Tokenizers and chat templates against transformers, on models made here and on the real ones where they are."""

from __future__ import annotations

import json
import os
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from oarlock.config.sections import ModelConfig
from oarlock.frontend.chat import load_chat_template
from oarlock.frontend.tokenizer import Tokenizer, load_tokenizer
from oarlock.model_summary import ModelSummary, load_summary

MODELS = Path(os.environ.get("OARLOCK_MODELS", Path.home() / ".cache" / "oarlock-models"))
REAL = {
    "smollm2": "gguf/SmolLM2-135M-Instruct.Q4_1.gguf",
    "qwen": "gguf/Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    "gemma3": "gguf/gemma-3-270m.Q4_K_M.gguf",
}
TEXTS = [
    "Hello world", "  two  spaces", "\n\n\ntabs\t\tx", "It's I'll we've DON'T", "naïve café ÅÄÖ ß", "日本語のテキスト", "中文，标点。", "한국어",
    "👩‍👩‍👧‍👦 🎉🎊 🏳️‍🌈", "def f(x):\n    return x**2  # comment\n\n", "for (int i=0;i<10;++i){ a[i]=0x1F; }", "12345 67 8.90 1,000",
    "https://x.y/z?q=1&r=%20", "\u200b\u00a0 nbsp", "ﷺ \u0301combining e\u0301", "<|im_start|>user\nhi<|im_end|>", "<bos>x<eos>", "العربية مرحبا",
    "हिन्दी परीक्षण", "ไทย", "🙂" * 5, "\r\n windows\r\n", "  ", "\n", " ", "", "x" * 50, "ALLCAPS camelCase snake_case", "...---...!!!???",
    "\U0001f1e6\U0001f1fa", "\x00\x01", "▁▁x▁", "Ġ Ċ", "a  b   c    d     e", "I ½ ② Ⅷ",
]  # fmt: skip


def texts(count: int) -> list[str]:
    """The list above, joined at random and with random characters of many scripts between."""
    rng = random.Random(7)
    pools = [range(32, 127)] * 5 + [range(0xA0, 0x2FFF), range(0x4E00, 0x9FFF), range(0x1F300, 0x1F6FF), range(32, 33), range(10, 11)]
    made = list(TEXTS)
    while len(made) < count:
        noise = "".join(chr(rng.choice(rng.choice(pools))) for _ in range(rng.randrange(40)))
        made.append("".join(rng.choice(TEXTS) for _ in range(rng.randrange(4))) + noise)
    return made


@lru_cache(maxsize=4)
def load(path: Path) -> tuple[ModelSummary, Tokenizer]:
    config = ModelConfig(str(path))
    summary = load_summary(config)
    return summary, load_tokenizer(summary, config)


def folder_of(name: str) -> Path:
    folder = MODELS / f"{name}-hf"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"{folder} is not there (tools/make_models.py makes it)")
    return folder


@lru_cache(maxsize=4)
def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def compare(mine: Tokenizer, theirs: Any, cases: list[str]) -> None:
    for text in cases:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert mine.encode(text, add_special_tokens=special) == ids, repr(text)
            for skip in (True, False):
                assert mine.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), repr(text)
    assert (mine.bos_token_id, mine.eos_token_id, mine.vocab_size) == (theirs.bos_token_id, theirs.eos_token_id, len(theirs))


@pytest.mark.parametrize("name", sorted(REAL))
def test_folders_tokenise_as_transformers_does(name: str) -> None:
    folder = folder_of(name)
    compare(load(folder)[1], reference(folder), texts(200))


@pytest.mark.parametrize("name", sorted(REAL))
def test_gguf_files_tokenise_as_transformers_does(name: str) -> None:
    folder = folder_of(name)
    if not (MODELS / REAL[name]).is_file():
        pytest.skip(f"{MODELS / REAL[name]} is not there")
    theirs = reference(folder) if name != "smollm2" else reference.__wrapped__(folder)
    if name == "smollm2":
        # The file says that digits stand alone (pre-tokenizer smollm); transformers' conversion into this folder dropped it.
        from tokenizers import pre_tokenizers

        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    compare(load(MODELS / REAL[name])[1], theirs, texts(200))


@pytest.mark.parametrize("name", sorted(REAL))
def test_real_text_streams_token_by_token(name: str) -> None:
    _, tokenizer = load(folder_of(name))
    for text in texts(60):
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = tokenizer.make_stream(False, [])
        assert "".join(stream.step([token]) for token in ids) + stream.flush() == tokenizer.decode(ids, False)


# ---------------------------------------------------------------- GPT-2's two files
def write_gpt2_files(folder: Path, **settings: Any) -> None:
    """vocab.json and merges.txt as GPT-2 and OPT have them, and no tokenizer.json."""
    from oarlock.frontend.gguf_tokenizer import byte_alphabet

    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("1", "2")]
    pieces = ["<pad>", "</s>", *byte_alphabet(), *("".join(pair) for pair in merges)]
    (folder / "vocab.json").write_text(json.dumps({piece: at for at, piece in enumerate(pieces)}), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **settings}))
    config = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(pieces), "max_position_embeddings": 64}))


@pytest.mark.parametrize(("add_bos", "prefix"), [(True, False), (False, False), (False, True)])
def test_vocab_and_merges_files_tokenise_as_transformers_does(tmp_path: Path, add_bos: bool, prefix: bool) -> None:
    token = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": True}
    write_gpt2_files(
        tmp_path, bos_token=token, eos_token=token, unk_token=token, pad_token="<pad>", add_bos_token=add_bos, add_prefix_space=prefix
    )
    _, mine = load(tmp_path)
    compare(mine, reference(tmp_path), [text for text in texts(150) if "<|" not in text])
    assert (mine.encode("hello</s>", add_special_tokens=True)[0] == 1) is add_bos


# ---------------------------------------------------------------- chat
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "Be brief.  "},
        {"role": "user", "content": "a\n<b> & 'c'"},
        {"role": "assistant", "content": " d "},
        {"role": "user", "content": "é🎉"},
    ],
    [{"role": "assistant", "content": "first"}, {"role": "user", "content": ""}],
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "é <x>", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
    }
]


@pytest.mark.parametrize("name", ["smollm2", "qwen"])
@pytest.mark.parametrize("source", ["folder", "file"])
def test_chats_render_as_in_transformers(name: str, source: str) -> None:
    folder = folder_of(name)
    summary, tokenizer = load(folder if source == "folder" else MODELS / REAL[name])
    template = load_chat_template(None, tokenizer, summary)
    assert template is not None
    theirs = reference(folder)
    for messages in CHATS:
        for start in (True, False):
            for tools in (None, TOOLS):
                expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=start, tools=tools)
                assert template.render(messages, add_generation_prompt=start, tools=tools) == expected
    continued = [*CHATS[0], {"role": "assistant", "content": "So far, "}]
    expected = theirs.apply_chat_template(continued, tokenize=False, continue_final_message=True)
    assert template.render(continued, add_generation_prompt=False, continue_final_message=True) == expected


HOSTILE = [
    "{{ messages | map(attribute='content') | list | tojson(indent=2) }}",
    "{%- for m in messages %}\n  {%- if m.role == 'user' %}\n    U:{{ m.content }}\n  {%- endif %}\n{%- endfor %}\n{{- '!' }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if loop.last %}{% continue %}{% endif %}{% endfor %}{{ ns.n }}",
    "{{ bos_token }}{% generation %}{{ messages[0]['content'] | trim | upper }}{% endgeneration %}{{ dict(a=1) }}{{ undefined_name }}",
    "{{ messages[0].content.split('h')[1] }}{{ messages[0].items() | list }}{{ {'a': [1, none, true]} | tojson }}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_template_features_work_as_in_transformers(source: str) -> None:
    folder = folder_of("smollm2")
    summary, tokenizer = load(folder)
    template = load_chat_template(source, tokenizer, summary)
    assert template is not None
    for messages in CHATS:
        assert template.render(messages) == reference(folder).apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=True
        )
