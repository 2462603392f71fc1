"""Build a tokenizer from the vocabulary in a GGUF header.

Owns: what `tokenizer.ggml.*` means.
Reads: `gguf_header`, `errors`.
Never: reads weights.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from oarlock.errors import ModelError
from oarlock.gguf_header import GGUFHeader

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_METASPACE = "\u2581"

_WORDS_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS_QWEN2 = _WORDS_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_WORDS_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> patterns that cut the text into words, applied one after the other.
_WORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "default", "phi-2", "gpt2", "mpt", "olmo"), (_WORDS_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", _WORDS_GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "falcon3", "pixtral"), (_WORDS_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (_WORDS_QWEN2,)),
    "tekken": (_WORDS_TEKKEN,),
}
# Vocabularies of which a whole word is looked up before merging, and which get a BOS where the file does not say.
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")


def build_tokenizer(header: GGUFHeader) -> Tokenizer:
    """The tokenizer whose vocabulary the header holds; the header must have been read with `large_arrays`.

    Raises:
        ModelError: the file has no vocabulary, or one of an unsupported kind.
    """
    meta = header.metadata
    kind, tokens = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{header.path} holds no vocabulary (tokenizer.ggml.tokens); give one with --tokenizer")
    types = meta.get("tokenizer.ggml.token_type")
    types = [1] * len(tokens) if types is None else types.tolist()
    if len(types) != len(tokens):
        raise ModelError(f"{header.path} is corrupt: {len(tokens)} tokens but {len(types)} token types")
    if kind == "gpt2":
        tokenizer = _byte_level(header, tokens, types)
    elif kind == "llama":
        tokenizer = _sentencepiece(header, tokens)
    else:
        raise ModelError(
            f"{header.path}: vocabularies of kind {kind!r} are not supported, gpt2 and llama are; give another with --tokenizer"
        )
    vocab_size = tokenizer.get_vocab_size()
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    own = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _USER_DEFINED and tokenizer.token_to_id(token) is not None]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ModelError(f"{header.path} is corrupt: a control token is not in its vocabulary")
    _add_bos_and_eos(tokenizer, meta, tokens)
    return tokenizer


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes for 256 and up, in order.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _byte_level(header: GGUFHeader, tokens: list[str], types: list[int]) -> Tokenizer:
    pre = header.metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _WORDS:
        raise ModelError(
            f"{header.path}: the pre-tokenizer {pre!r} is not known ({', '.join(_WORDS)} are); give a tokenizer with --tokenizer"
        )
    alphabet = byte_alphabet()
    spelling = {byte: char for char, byte in alphabet.items()}
    characters = alphabet.keys()
    vocab = {}
    for index, (token, type_) in enumerate(zip(tokens, types, strict=True)):
        if type_ not in (_CONTROL, _USER_DEFINED) and not characters >= set(token):
            token = "".join(spelling[byte] for byte in token.encode("utf-8", "surrogateescape"))
        vocab[token] = index
    merges = header.metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ModelError(f"{header.path} is corrupt: a gpt2 vocabulary without tokenizer.ggml.merges")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        model = BPE(vocab=vocab, merges=pairs, fuse_unk=False, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    except Exception as error:  # noqa: BLE001  the library raises plain Exception
        raise ModelError(f"{header.path} is corrupt: its merges do not fit its vocabulary ({error})") from None
    tokenizer = Tokenizer(model)
    if _WORDS[pre] == (_WORDS_QWEN2,) and pre != "stablelm2":
        tokenizer.normalizer = normalizers.NFC()  # the file does not say it; Qwen's own tokenizers do it
    split = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _WORDS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: GGUFHeader, tokens: list[str]) -> Tokenizer:
    meta = header.metadata
    gemma = meta.get("general.architecture", "").startswith("gemma")
    if gemma:
        # Runs of spaces are stored as spaces; the text that is looked up has them replaced.
        tokens = [_METASPACE * len(token) if " " in token and not token.strip(" ") else token for token in tokens]
    vocab = {token: index for index, token in enumerate(tokens)}
    scores: Any = meta.get("tokenizer.ggml.scores")
    if not gemma and (scores is None or len(scores) != len(tokens)):
        raise ModelError(f"{header.path} is corrupt: a llama vocabulary without one score for each token")
    # Gemma's scores do not say the order of its merges, the order of its tokens does.
    order = tokens if gemma else [token for _, token in sorted(zip((-scores).tolist(), tokens, strict=True), key=lambda pair: pair[0])]
    unknown = meta.get("tokenizer.ggml.unknown_token_id")
    unknown_token = tokens[unknown] if unknown is not None and 0 <= unknown < len(tokens) else None
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=_merges(order, vocab), unk_token=unknown_token, fuse_unk=True, byte_fallback=True))
    tail: list[Any] = [decoders.Replace(_METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", not gemma))
    # As sentencepiece does, a space is put before every text, also one that starts with a space.
    steps: list[Any] = [normalizers.Prepend(_METASPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _METASPACE)])
    tokenizer.decoder = decoders.Sequence([*tail, decoders.Strip(" ", 1, 0)] if prefix else tail)
    return tokenizer


def _merges(order: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make each token of two others, best token first, longest left part first.

    PERF: 262,144 tokens take about a second.
    """
    merges = []
    for token in order:
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if left in vocab:
                right = token[cut:]
                if right in vocab:
                    merges.append((left, right))
    return merges


def _add_bos_and_eos(tokenizer: Tokenizer, meta: dict[str, Any], tokens: list[str]) -> None:
    """What `encode` puts around a text. Sentencepiece files, and some others, get a BOS unless they say otherwise."""
    around = []
    by_default = meta.get("tokenizer.ggml.model") == "llama" or meta.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    for name, default in (("bos", by_default), ("eos", False)):
        token_id: Any = meta.get(f"tokenizer.ggml.{name}_token_id")
        wanted = meta.get(f"tokenizer.ggml.add_{name}_token", default) and token_id is not None and 0 <= token_id < len(tokens)
        around.append((tokens[token_id], token_id) if wanted else None)
    bos, eos = around
    if bos or eos:
        pieces = [bos[0] if bos else None, "$A", eos[0] if eos else None]
        special = list({pair[0]: pair for pair in around if pair}.values())
        tokenizer.post_processor = processors.TemplateProcessing(single=[piece for piece in pieces if piece], special_tokens=special)
