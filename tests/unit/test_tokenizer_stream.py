"""Text as a stream: small tokenizers of each kind, and every property that streamed text must have."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oarlock.errors import ModelError
from oarlock.frontend.gguf_tokenizer import byte_alphabet
from oarlock.frontend.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE, WordLevel


def finish(backend: RustTokenizer) -> Tokenizer:
    backend.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<a b>", special=True)])
    backend.add_tokens([AddedToken("<tool> x", special=False)])
    return Tokenizer(backend, name="toy", eos_token="<eos>")


def byte_level() -> Tokenizer:
    vocab = {char: at for at, char in enumerate(byte_alphabet())} | {"ab": 256, "Ġa": 257}
    backend = RustTokenizer(BPE(vocab=vocab, merges=[("a", "b"), ("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return finish(backend)


def sentencepiece(strip: bool) -> Tokenizer:
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ("▁", "▁▁", "▁a", "b", "é", "日", "a▁b"):
        vocab[piece] = len(vocab)
    backend = RustTokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tail: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*tail, decoders.Strip(" ", 1, 0)] if strip else tail)
    return finish(backend)


def metaspace() -> Tokenizer:
    backend = RustTokenizer(BPE(vocab={"▁a": 0, "b": 1, "▁": 2, "c▁d": 3}, merges=[]))
    backend.decoder = decoders.Metaspace()
    return finish(backend)


KINDS = {"byte level": byte_level(), "llama": sentencepiece(strip=True), "gemma": sentencepiece(strip=False), "metaspace": metaspace()}
kinds = st.sampled_from(sorted(KINDS))
TOKEN_OF = {kind: {tokenizer.token_bytes(token): token for token in range(260)} for kind, tokenizer in KINDS.items()}
ids = st.lists(st.integers(0, 300), max_size=12)
# Bytes of characters of every length, so that cuts fall inside them often.
BYTES = st.lists(st.sampled_from([*"aé日🎉 ".encode(), 0x80, 0xFF, 0xF0, 0xED]), max_size=12)


@settings(max_examples=150, deadline=None)
@given(kinds, ids, st.lists(ids, max_size=5), st.booleans())
def test_streamed_text_is_the_rest_of_the_whole_text(kind: str, prompt: list[int], steps: list[list[int]], skip: bool) -> None:
    tokenizer = KINDS[kind]
    stream = tokenizer.make_stream(skip, prompt)
    text = "".join(stream.step(step) for step in steps) + stream.flush()
    whole = tokenizer.decode(prompt + [token for step in steps for token in step], skip)
    assert text == whole[len(tokenizer.decode(prompt, skip)) :]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["byte level", "llama", "gemma"]), BYTES, BYTES, st.integers(1, 4))
def test_bytes_cut_anywhere_decode_as_the_whole_does(kind: str, prompt: list[int], rest: list[int], stride: int) -> None:
    tokenizer = KINDS[kind]
    first, second = ([TOKEN_OF[kind][bytes([byte])] for byte in part] for part in (prompt, rest))
    stream = tokenizer.make_stream(True, first)
    pieces = [stream.step(second[at : at + stride]) for at in range(0, len(second), stride)]
    whole = bytes(prompt + rest).decode("utf-8", "replace")
    seen = bytes(prompt).decode("utf-8", "replace")
    if kind == "llama":
        whole, seen = whole.removeprefix(" "), seen.removeprefix(" ")
    assert "".join(pieces) + stream.flush() == whole[len(seen) :]


@pytest.mark.parametrize("kind", ["byte level", "llama", "gemma"])
def test_a_character_comes_when_its_last_byte_comes(kind: str) -> None:
    tokenizer = KINDS[kind]
    stream = tokenizer.make_stream(True, [])
    assert [stream.step([TOKEN_OF[kind][bytes([byte])]]) for byte in "🎉é".encode()] == ["", "", "", "🎉", "", "é"]
    assert stream.flush() == ""


def test_an_unfinished_character_is_one_replacement_character_at_the_end() -> None:
    tokenizer = KINDS["byte level"]
    alphabet = {byte: at for at, (_, byte) in enumerate(byte_alphabet().items())}
    stream = tokenizer.make_stream(True, [])
    assert stream.step([alphabet[byte] for byte in "🎉".encode()[:3]]) == ""
    assert stream.flush() == "\ufffd"
    assert tokenizer.decode([alphabet[byte] for byte in "🎉".encode()[:3]]) == "\ufffd"


def test_a_leading_space_is_dropped_at_the_start_of_the_text_only() -> None:
    tokenizer = KINDS["llama"]
    space_a = next(token for token in range(300) if tokenizer.id_to_token(token) == "▁a")
    eos = tokenizer.eos_token_id
    assert eos is not None
    assert tokenizer.decode([space_a, space_a]) == "a a"
    assert tokenizer.make_stream(True, [space_a]).step([space_a]) == " a"
    assert tokenizer.make_stream(True, [eos]).step([space_a]) == "a", "a prompt of special tokens has no text"
    assert tokenizer.make_stream(False, [eos]).step([space_a]) == " a"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_special_tokens_are_skipped_or_shown_literally(kind: str) -> None:
    tokenizer = KINDS[kind]
    names = ("<eos>", "<a b>", "<tool> x")
    special = [next(token for token in range(400) if tokenizer.id_to_token(token) == name) for name in names]
    assert tokenizer.decode(special, skip_special_tokens=True) == "<tool> x"
    assert tokenizer.decode(special, skip_special_tokens=False) == "".join(names)
    assert [tokenizer.token_bytes(token) for token in special] == [name.encode() for name in names]
    assert set(special[:2]) <= tokenizer.all_special_ids and special[2] not in tokenizer.all_special_ids


@pytest.mark.parametrize("unknown", [400, 10**6, 2**31, 2**40, -1])
def test_unknown_ids_have_no_text(unknown: int) -> None:
    tokenizer = KINDS["byte level"]
    assert tokenizer.decode([unknown]) == "" and tokenizer.token_bytes(unknown) == b"" and tokenizer.id_to_token(unknown) == ""


def test_token_bytes_join_to_the_text() -> None:
    tokenizer = KINDS["byte level"]
    ids = tokenizer.encode("ab a日", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == "ab a日".encode()


def test_a_long_prompt_costs_a_stream_nothing() -> None:
    tokenizer = byte_level()
    tokenizer.make_stream(True, list(range(256)) * 1000)
    assert len(tokenizer._bytes) <= 4


def test_a_tokenizer_without_decoder_joins_words_by_spaces() -> None:
    backend = RustTokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = Tokenizer(backend, name="words")
    assert tokenizer.decode([0, 1, 1]) == backend.decode([0, 1, 1]) == "a b b"
    assert tokenizer.make_stream(True, [0]).step([1]) == " b"


def test_an_unknown_decoder_is_refused_by_name() -> None:
    backend = RustTokenizer(WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="decoder WordPiece is not supported"):
        Tokenizer(backend, name="words")
