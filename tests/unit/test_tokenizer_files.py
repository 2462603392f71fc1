"""Tokenizers from files: GGUF vocabularies, folders, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from oarlock.config.sections import ModelConfig
from oarlock.errors import ConfigError, ModelError
from oarlock.frontend.gguf_tokenizer import byte_alphabet
from oarlock.frontend.tokenizer import Tokenizer, load_tokenizer
from oarlock.model_summary import ModelSummary
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
BYTES = list(byte_alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ Ġ", "ĠĠ Ġ"]
TOKENS = [*BYTES, *(merge.replace(" ", "") for merge in MERGES), "<|end|>", "<tool call>", "[PAD]"]
TYPES = [NORMAL] * (len(BYTES) + len(MERGES)) + [CONTROL, USER_DEFINED, UNUSED]
END = TOKENS.index("<|end|>")


def write(path: Path, **keys: Any) -> Path:
    """A GGUF file that is nothing but a vocabulary."""
    writer = gguf.GGUFWriter(str(path), keys.pop("architecture", "llama"))
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}[type(value)]
        add(key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(path: Path, **changes: Any) -> Tokenizer:
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": TYPES,
        "merges": MERGES,
        "eos_token_id": END,
        "bos_token_id": END,
    }
    return load(write(path, **{key: value for key, value in {**keys, **changes}.items() if value is not None}))


def load(path: Path, **config: Any) -> Tokenizer:
    return load_tokenizer(ModelSummary(str(path), "LlamaForCausalLM"), ModelConfig(str(path), **config))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


def words(tokenizer: Tokenizer, text: str, **options: bool) -> list[str]:
    return [tokenizer.id_to_token(token) for token in tokenizer.encode(text, **options)]


# ---------------------------------------------------------------- GGUF, byte level
def test_a_byte_level_vocabulary_encodes_and_decodes(path: Path) -> None:
    tokenizer = byte_level(path)
    assert words(tokenizer, "hello hello<|end|><tool call>") == ["hello", "Ġhello", "<|end|>", "<tool call>"]
    assert tokenizer.decode(tokenizer.encode("é 🎉 hello<|end|><tool call>")) == "é 🎉 hello<tool call>"
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.vocab_size) == (END, END, len(TOKENS))
    assert tokenizer.all_special_ids == {END} and tokenizer.token_bytes(END + 1) == b"<tool call>"
    assert tokenizer.special_tokens_map == {"bos_token": "<|end|>", "eos_token": "<|end|>"}


def test_the_pre_tokenizer_decides_where_words_end(path: Path) -> None:
    assert words(byte_level(path), "   1") == ["ĠĠ", "Ġ", "1"]
    assert words(byte_level(path, pre="smollm"), "   1") == ["ĠĠĠ", "1"], "digits stand alone, so the spaces stay together"
    assert words(byte_level(path, pre="qwen2"), "e\u0301") == ["Ã", "©"], "Qwen composes characters"
    assert words(byte_level(path), "e\u0301") == ["e", "Ì", "ģ"]


@pytest.mark.parametrize(
    ("changes", "start", "end"),
    [
        ({}, False, False),
        ({"add_bos_token": True}, True, False),
        ({"add_eos_token": True}, False, True),
        ({"pre": "llama-bpe"}, True, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
    ],
)
def test_bos_and_eos_are_added_when_the_file_says_so(path: Path, changes: dict[str, Any], start: bool, end: bool) -> None:
    tokenizer = byte_level(path, **changes)
    assert words(tokenizer, "hello") == ["<|end|>"] * start + ["hello"] + ["<|end|>"] * end
    assert words(tokenizer, "hello", add_special_tokens=False) == ["hello"]


def test_the_files_chat_templates_are_found(path: Path) -> None:
    assert byte_level(path, **{"tokenizer.chat_template": "plain"}).chat_template == "plain"
    several = {"tokenizer.chat_template": "plain", "tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    assert byte_level(path, **several).chat_template == {"default": "plain", "tool_use": "tools"}
    assert byte_level(path).chat_template is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, "no vocabulary"),
        ({"model": "bert"}, "'bert' are not supported"),
        ({"pre": "strange"}, "pre-tokenizer 'strange' is not known"),
        ({"merges": None}, r"without tokenizer\.ggml\.merges"),
        ({"merges": ["h zz"]}, "merges do not fit"),
        ({"merges": ["hzz"]}, "merges do not fit"),
        ({"token_type": [1, 1]}, "2 token types"),
        ({"eos_token_id": 10**6}, None),
    ],
)
def test_broken_vocabularies_are_refused_by_name(path: Path, changes: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert byte_level(path, **changes).eos_token_id is None
        return
    with pytest.raises(ModelError, match=words) as caught:
        byte_level(path, **changes)
    assert "m.gguf" in str(caught.value)


# ---------------------------------------------------------------- GGUF, sentencepiece
@pytest.fixture(scope="module")
def sentencepiece_model() -> Any:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    lines = [
        "hello world, hello there",
        "the quick brown fox jumps over the lazy dog",
        "a b c d e f 1 2 3",
        "日本語 テキスト",
        "def f(x): return x",
    ] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=420, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False, user_defined_symbols=["<tool>"], minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def from_model(path: Path, model: Any, **keys: Any) -> Tokenizer:
    size = model.get_piece_size()
    kinds = [
        6 if model.is_byte(i) else 3 if model.is_control(i) else 2 if model.is_unknown(i) else 4 if model.id_to_piece(i) == "<tool>" else 1
        for i in range(size)
    ]
    pieces, scores = [model.id_to_piece(i) for i in range(size)], [model.get_score(i) for i in range(size)]
    ids = {"unknown_token_id": model.unk_id(), "bos_token_id": model.bos_id(), "eos_token_id": model.eos_id()}
    return load(write(path, model="llama", pre="default", tokens=pieces, scores=scores, token_type=kinds, **ids, **keys))


@pytest.mark.parametrize(
    "text",
    ["hello world", "  two  spaces", "the foxes, 12", "unseen: ÿ 🎉 日本", "", " ", "\n\ttabs", "jumps   over", "hello日本語there", "▁x"],
)
def test_a_sentencepiece_vocabulary_encodes_as_sentencepiece_does(path: Path, sentencepiece_model: Any, text: str) -> None:
    tokenizer = from_model(path, sentencepiece_model)
    assert tokenizer.encode(text, add_special_tokens=False) == sentencepiece_model.encode(text)
    assert tokenizer.encode(text) == [sentencepiece_model.bos_id(), *sentencepiece_model.encode(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


def test_sentencepiece_options_are_honoured(path: Path, sentencepiece_model: Any) -> None:
    tokenizer = from_model(path, sentencepiece_model, add_bos_token=False, add_space_prefix=False)
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"
    assert tokenizer.id_to_token(tokenizer.encode("hello")[0])[0] != "▁"
    assert words(tokenizer, "hello<tool>hello").count("<tool>") == 1


# ---------------------------------------------------------------- folders
def save(folder: Path, **settings: Any) -> Path:
    backend = RustTokenizer(BPE(vocab={char: at for at, char in enumerate(BYTES)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_folders_settings_are_read(tmp_path: Path) -> None:
    tokenizer = load(save(tmp_path, bos_token={"content": "<s>"}, eos_token="</s>", chat_template="from config"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (256, 257, "from config")
    assert len(tokenizer.encode("much longer than four")) == 21, "truncation and padding of the file are for training"


def test_special_tokens_are_also_found_in_their_own_file(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    tokenizer = load(save(tmp_path, bos_token=None))
    assert tokenizer.eos_token_id == 257


@pytest.mark.parametrize(
    ("flags", "expected"), [({}, "ab"), ({"add_bos_token": True}, "<s>ab"), ({"add_bos_token": True, "add_eos_token": True}, "<s>ab</s>")]
)
def test_a_folders_flags_add_bos_and_eos(tmp_path: Path, flags: dict[str, bool], expected: str) -> None:
    assert "".join(words(load(save(tmp_path, bos_token="<s>", eos_token="</s>", **flags)), "ab")) == expected


def test_the_chat_templates_own_file_wins(tmp_path: Path) -> None:
    save(tmp_path, chat_template="from config")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load(tmp_path).chat_template == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert load(tmp_path).chat_template == "from jinja"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert load(tmp_path).chat_template == {"default": "from jinja", "tool_use": "tools"}
    named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    (tmp_path / "second").mkdir()
    assert load(save(tmp_path / "second", chat_template=named)).chat_template == {"default": "a", "rag": "b"}


def test_another_tokenizer_can_be_named(tmp_path: Path, path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    save(folder, eos_token="</s>")
    write(path, model="bert")
    assert load(path, tokenizer=str(folder)).eos_token_id == 257


def test_missing_and_broken_folders_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(
        ModelError, match=r"no tokenizer\.json.*other tokenizer files: tokenizer\.model.*--tokenizer.*--skip-tokenizer-init"
    ):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "mod')
    with pytest.raises(ModelError, match="tokenizer files cannot be read"):
        load(tmp_path)
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read"):
        load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read"):
        load(tmp_path)
    save(tmp_path, eos_token=5)
    with pytest.raises(ModelError, match="5 as a special token"):
        load(tmp_path)
    save(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja cannot be read"):
        load(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"tokenizer absent/"):
        load(tmp_path, tokenizer="absent/absent/absent")


def test_slow_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="slow") as caught:
        load(save(tmp_path), tokenizer_mode="slow")
    assert caught.value.option == "--tokenizer-mode"
