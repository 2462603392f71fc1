"""Text to token ids and back, by the `tokenizers` library.

Owns: the tokenizer of a model, and what its text is: the bytes of its tokens, decoded as UTF-8.
Reads: `model_summary`, `gguf_header`, `hub`, `config`, `errors`.
Never: imports torch or transformers; executes code of a checkpoint.

Text is *defined* by the stream: the bytes of the tokens are joined and decoded, an incomplete or invalid sequence
becoming one U+FFFD, so that streamed and whole text are the same by construction.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from oarlock.config.resolve import from_dict
from oarlock.config.sections import ModelConfig
from oarlock.errors import ConfigError, ModelError
from oarlock.frontend.gguf_tokenizer import build_tokenizer, byte_alphabet
from oarlock.gguf_header import is_gguf, read_header
from oarlock.hub import resolve_tokenizer
from oarlock.model_summary import ModelSummary


class Tokenizer:
    """One model's tokenizer. Immutable but for its cache of token bytes, which several threads may fill."""

    def __init__(
        self,
        backend: RustTokenizer,
        *,
        name: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        other_special: Sequence[str] = (),
        chat_template: str | dict[str, str] | None = None,
        special_tokens_map: dict[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self.name = name  # folder or file, for messages
        self.chat_template = chat_template
        self.special_tokens_map = special_tokens_map or {}  # "bos_token" -> text, for chat templates
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token, self.eos_token = bos_token, eos_token
        self.bos_token_id: int | None = backend.token_to_id(bos_token) if bos_token else None
        self.eos_token_id: int | None = backend.token_to_id(eos_token) if eos_token else None
        self._added = backend.get_added_tokens_decoder()
        named = {backend.token_to_id(token) for token in (bos_token, eos_token, *other_special) if token}
        self.all_special_ids = frozenset({i for i, token in self._added.items() if token.special} | {i for i in named if i is not None})
        decoder = backend.decoder
        self._decoding = _Decoding(None if decoder is None else json.loads(decoder.__getstate__()), name)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens spelled out in the text become their ids."""
        # PERF: unlike `encode`, the batch call lets other threads run: a text of 2 MB held an event loop for 4 s, now for 0.03 s.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all these tokens, as a stream that starts with them would give it. Unknown ids have no text."""
        stream = self.make_stream(skip_special_tokens, ())
        return stream.step(list(ids)) + stream.flush()

    def make_stream(self, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = (), shown: Sequence[str] = ()) -> TokenStream:
        """A decoder for the tokens that follow `prompt_ids`. `shown`: special tokens that are not skipped."""
        return TokenStream(self, self.all_special_ids - set(map(self.token_to_id, shown)) if skip_special_tokens else frozenset(), prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token, its leading space included; the literal text of a special one; empty for unknown ids."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute_bytes(token_id)
        return found

    def id_to_token(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for unknown ids."""
        return self._backend.id_to_token(token_id) or "" if 0 <= token_id < 1 << 32 else ""

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def _compute_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            text = added.content if added.special else self._decoding.replace(added.content)
            return self._decoding.separator + text.encode("utf-8", "surrogatepass")
        token = self.id_to_token(token_id)
        return self._decoding.separator + self._decoding.token_bytes(token) if token else b""

    @property
    def strips_leading_space(self) -> bool:
        """Whether the first space of a whole text is not part of it."""
        return self._decoding.strip_left


class TokenStream:
    """Turns tokens into text as they come, holding back what is not yet a whole character. O(1) for each token.

    step(...) + step(...) + ... + flush() == decode(prompt + all)[len(decode(prompt)):]
    """

    __slots__ = ("_bytes_of", "_decoder", "_drop", "_skip", "_strip")

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], prompt_ids: Sequence[int]) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skip = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token_id in reversed(prompt_ids):  # ends after a few tokens, unless they are all without text
            if token_id not in self._skip:
                tail = self._bytes_of(token_id) + tail
                if len(tail) >= 4:
                    break
        self._decoder.decode(tail)
        # The prompt's text ends with U+FFFD for bytes that it leaves open (two for the start of a surrogate, which the
        # decoder keeps too): what becomes of them is not new text.
        self._drop = len(self._decoder.getstate()[0].decode("utf-8", "replace"))
        self._strip = tokenizer.strips_leading_space and not tail

    def step(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete, often empty."""
        data = b"".join([self._bytes_of(token_id) for token_id in ids if token_id not in self._skip])
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._emit(self._decoder.decode(data))

    def flush(self) -> str:
        """What is held back, at the end: U+FFFD for a character that never came to its end."""
        return self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._drop and text:
            text, self._drop = text[self._drop :], max(0, self._drop - len(text))
        return text


class _Decoding:
    """How the vocabulary's spelling becomes bytes, from the decoder of tokenizer.json."""

    def __init__(self, decoder: dict[str, Any] | None, name: str) -> None:
        self.byte_level = self.byte_fallback = False
        self.replacements: list[tuple[str, str]] = []
        self.separator = b"" if decoder else b" "  # without a decoder tokens are words
        self.strip_left = not decoder
        for step in decoder.get("decoders", [decoder]) if decoder else ():
            kind = step["type"]
            if kind == "ByteLevel":
                self.byte_level = True
            elif kind == "ByteFallback":
                self.byte_fallback = True
            elif kind == "Replace" and "String" in step["pattern"]:
                self.replacements.append((step["pattern"]["String"], step["content"]))
            elif kind == "Strip" and step["content"] == " " and step["start"] <= 1 and step["stop"] == 0:
                self.strip_left = step["start"] == 1
            elif kind == "Metaspace":
                self.replacements.append((step["replacement"], " "))
                self.strip_left = step.get("prepend_scheme", "always") != "never"
            elif kind != "Fuse":
                raise ModelError(
                    f"{name}: the tokenizer's decoder {kind} is not supported; ByteLevel, ByteFallback, Metaspace, Replace of a string "
                    "and Strip of one space are"
                )
        self._alphabet = byte_alphabet() if self.byte_level else {}

    def replace(self, token: str) -> str:
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token

    def token_bytes(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([self._alphabet[char] for char in token])
            except KeyError:
                return token.encode("utf-8", "surrogatepass")
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return self.replace(token).encode("utf-8", "surrogatepass")


def load_tokenizer(summary: ModelSummary, config: ModelConfig) -> Tokenizer:
    """The tokenizer that `--tokenizer` names, else the model's own.

    Raises:
        ModelError: its files are missing or broken, or of a kind that is not supported.
        ConfigError: `--tokenizer-mode slow`.
    """
    if config.tokenizer_mode == "slow":
        raise ConfigError("--tokenizer-mode slow is not built yet; use auto", option="--tokenizer-mode")
    path = resolve_tokenizer(config, summary.path)
    return _from_gguf(path) if is_gguf(path) else _from_folder(Path(path))


def load_vocabulary(source: str) -> tuple[list[bytes], list[int], list[int], Callable[[str], list[int]]]:
    """Every token's bytes, the ids of special ones, those that end a text, and how a text becomes ids.

    `source` is the engine's description of itself, as JSON.

    Raises as `load_tokenizer` does.
    """
    data = json.loads(source)
    summary = ModelSummary.from_dict(data["summary"])
    tokenizer = load_tokenizer(summary, from_dict(data["config"]).model)
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(summary.vocab_size)]
    ends = {*summary.eos_token_ids, *(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))}
    return tokens, sorted(tokenizer.all_special_ids), sorted(ends), functools.partial(tokenizer.encode, add_special_tokens=False)


def _from_gguf(path: str) -> Tokenizer:
    header = read_header(path, large_arrays=True)
    meta = header.metadata
    tokens = meta.get("tokenizer.ggml.tokens") or []

    def text_of(name: str) -> str | None:
        token_id = meta.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[token_id] if token_id is not None and 0 <= token_id < len(tokens) else None

    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {key: text for key, name in names.items() if (text := text_of(name)) is not None}
    template: Any = meta.get("tokenizer.chat_template")
    extra = {
        name: meta[f"tokenizer.chat_template.{name}"]
        for name in meta.get("tokenizer.chat_templates") or ()
        if f"tokenizer.chat_template.{name}" in meta
    }
    if extra and template:
        template = {"default": template, **extra}
    return Tokenizer(
        build_tokenizer(header),
        name=path,
        bos_token=named.get("bos_token"),
        eos_token=named.get("eos_token"),
        other_special=[named[key] for key in ("unk_token", "pad_token") if key in named],
        chat_template=template,
        special_tokens_map=named,
    )


def _from_folder(folder: Path) -> Tokenizer:
    settings = _read_json(folder / "tokenizer_config.json")
    settings = {**_read_json(folder / "special_tokens_map.json"), **settings}
    named = {key: text for key in ("bos_token", "eos_token", "unk_token", "pad_token") if (text := _text(settings.get(key)))}
    backend = _backend(folder, named, add_prefix_space=bool(settings.get("add_prefix_space")))
    if backend.normalizer is None and str(settings.get("tokenizer_class", "")).startswith("Qwen2Tokenizer"):
        backend.normalizer = normalizers.NFC()  # this class always normalises; conversions lose it from tokenizer.json
    # The two flags, where they are given, win over what tokenizer.json puts around a text.
    if "add_bos_token" in settings or "add_eos_token" in settings:
        ends = {key: named.get(key) if settings.get(f"add_{key}") else None for key in ("bos_token", "eos_token")}
        pairs = {token: backend.token_to_id(token) for token in ends.values() if token}
        pieces = [ends["bos_token"], "$A", ends["eos_token"]]
        backend.post_processor = processors.TemplateProcessing(
            single=[piece for piece in pieces if piece], special_tokens=list(pairs.items())
        )
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(
        backend,
        name=str(folder),
        bos_token=named.get("bos_token"),
        eos_token=named.get("eos_token"),
        other_special=[named[key] for key in ("unk_token", "pad_token") if key in named],
        chat_template=_chat_template(folder, settings),
        special_tokens_map=named,
    )


def _backend(folder: Path, named: dict[str, str], *, add_prefix_space: bool) -> RustTokenizer:
    """From tokenizer.json, else from the two files of byte-level BPE (GPT-2, OPT)."""
    whole, vocab, merges = folder / "tokenizer.json", folder / "vocab.json", folder / "merges.txt"
    try:
        if whole.is_file():
            return RustTokenizer.from_file(str(whole))
        if vocab.is_file() and merges.is_file():
            backend = RustTokenizer(BPE.from_file(str(vocab), str(merges)))
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
            backend.decoder = decoders.ByteLevel()
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in dict.fromkeys(named.values())])
            return backend
    except Exception as error:  # noqa: BLE001  the library raises plain Exception
        raise ModelError(f"{folder}: the tokenizer files cannot be read: {error}; are they truncated?") from None
    found = ", ".join(file.name for file in sorted(folder.glob("*.model"))) or "none"
    raise ModelError(
        f"{folder} has no tokenizer.json, nor vocab.json with merges.txt (other tokenizer files: {found}). Name a folder that has one with "
        "--tokenizer, write one with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...), or use --skip-tokenizer-init"
    )


def _text(token: Any) -> str | None:
    """A token given as text or as an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise ModelError(f"the tokenizer's files give {token!r:.80} as a special token; it must be a text")
    return text


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; is the file truncated?") from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}; is the file truncated?") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | dict[str, str] | None:
    """From chat_template.jinja and additional_chat_templates, else chat_template.json, else tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        template = _read_text(file)
        return {"default": template, **{extra.stem: _read_text(extra) for extra in more}} if more else template
    found = _read_json(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found if isinstance(entry, dict) and "name" in entry and "template" in entry}
    return found
