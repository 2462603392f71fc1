"""What core needs to know of a checkpoint, read from config.json or a GGUF header. No torch, no weights.

Owns: `ModelSummary` and how it is derived.
Reads: `config`, `errors`, `hub`, `gguf_config`, `pooling_params`, `rope_config`.
Never: opens a weight file beyond its header; imports torch or transformers; executes code of a checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oarlock.config.sections import ModelConfig
from oarlock.errors import ConfigError, ModelError, UnsupportedArchitecture
from oarlock.gguf_config import config_of
from oarlock.gguf_header import is_gguf, read_header
from oarlock.hub import resolve_model
from oarlock.pooling_params import read_pooler_config
from oarlock.rope_config import merge_rope_flags, normalise_rope, scaled_length

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """Frozen facts about one checkpoint, after overrides."""

    path: str  # local folder or .gguf file
    architecture: str  # "LlamaForCausalLM"
    hf_config: dict[str, Any] = field(
        default_factory=dict
    )  # config.json (text part for composite models), or the same keys made from a GGUF header
    num_layers: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    max_model_len: int = 0  # after --max-model-len, rope scaling and --disable-sliding-window
    derived_max_model_len: int = 0  # what the checkpoint allows
    dtype: str = "float32"  # the checkpoint's
    sliding_window: int | None = None  # tokens; None when no layer has one, or it is disabled
    layer_windows: tuple[int | None, ...] = ()  # per layer
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()  # config and generation_config together
    bos_token_id: int | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)  # sampling defaults of the checkpoint
    quantization_config: dict[str, Any] | None = None
    is_gguf: bool = False
    is_gguf_quantised: bool = False
    pooler_config: dict[str, Any] = field(default_factory=dict)  # of PoolingParams' fields

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelSummary:
        """The inverse of `dataclasses.asdict`, also after a round through JSON, which turns tuples into lists."""
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**fields)


_LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length",
    "max_seq_length", "seq_len",
)  # fmt: skip
# Composite checkpoints whose text part is served alone, under the name of the text model.
_TEXT_ARCHITECTURES = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
}
# A config.json keeps only what differs from the base class, so text parts of composites lack these.
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False, "bos_token_id": 2, "eos_token_id": 1,
    },
    "gemma2": {"sliding_window": 4096, "head_dim": 256},
}  # fmt: skip
# Model types whose class does not tie the embeddings when config.json is silent; the base class does.
_UNTIED = frozenset(("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "phi", "olmo", "olmo2", "granite"))
_NUMBERS = (
    "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon",
    "sliding_window", "max_window_layers",
)  # fmt: skip
MAX_LAYERS = 10_000  # a count beyond it is a mistake, and would be met only after every layer had been laid out
_FULL_UNLESS_ASKED = frozenset(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"))  # windows need use_sliding_window: true


def load_summary(config: ModelConfig) -> ModelSummary:
    """Read a folder, a .gguf file or a hub name (fetched first; see `hub.resolve_model`).

    Raises:
        ModelError: config.json or the header is missing, broken or lacks a needed value.
        ConfigError: `--max-model-len`, `--rope-scaling`, `--disable-sliding-window` or an override cannot be honoured.
    """
    path = resolve_model(config)
    from_file = is_gguf(path)
    if not from_file and not Path(path).is_dir():
        raise ModelError(f"{path} is neither a folder nor a GGUF file; give the folder that has config.json")
    if from_file:
        raw, generation = config_of(read_header(path)), {}
    else:
        folder = Path(path)
        raw = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    architecture, hf_config = _text_part(path, raw, config)
    hf_config = normalise_rope(merge_rope_flags(hf_config, config.rope_scaling, config.rope_theta))
    _check_numbers(path, hf_config)
    sizes = _sizes(path, hf_config)
    windows = _layer_windows(hf_config, sizes["num_layers"])
    context = _checkpoint_length(hf_config)
    windows = tuple(None if window and window >= context else window for window in windows)  # a window that no context exceeds is none
    derived, max_len = _lengths(hf_config, config, windows, context)
    if config.disable_sliding_window:
        windows = (None,) * len(windows)
    return ModelSummary(
        path=str(path),
        architecture=architecture,
        hf_config=hf_config,
        **sizes,
        max_model_len=max_len,
        derived_max_model_len=derived,
        dtype=_dtype(path, hf_config, raw),
        sliding_window=next((window for window in windows if window), None),
        layer_windows=windows,
        tie_word_embeddings=bool(hf_config.get("tie_word_embeddings", hf_config.get("model_type") not in _UNTIED)),
        eos_token_ids=_ids("eos_token_id", hf_config, raw, generation),
        bos_token_id=next(iter(_ids("bos_token_id", hf_config, raw)), None),
        generation_config=_generation(config, generation),
        quantization_config=_quantization(Path(path), raw, from_file),
        is_gguf=from_file,
        is_gguf_quantised=bool(from_file and raw.get("gguf_blocks")),
        pooler_config=read_pooler_config(config.pooler_config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}: it is not a model folder in the Hugging Face format, nor a .gguf file"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}; is the file truncated?") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _text_part(path: str, raw: dict[str, Any], config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The architecture and the config of the language model, with class defaults and `hf_overrides`."""
    part = raw.get("text_config")
    hf_config = {**part} if isinstance(part, dict) else {**raw}
    if isinstance(part, dict):
        hf_config.update({key: raw[key] for key in ("tie_word_embeddings", "auto_map", "vocab_size") if key in raw and key not in part})
    defaults = _CLASS_DEFAULTS.get(hf_config.get("model_type", ""), {})
    if "rope_parameters" in hf_config:
        defaults = {key: value for key, value in defaults.items() if not key.startswith("rope_")}
    hf_config = {**defaults, **hf_config}
    overrides = dict(config.hf_overrides)
    hf_config.update(overrides.pop("text_config", {}))
    hf_config.update(overrides)
    names = overrides.get("architectures") or raw.get("architectures") or hf_config.get("architectures")
    if not isinstance(names, list) or not names:
        hint = " (its auto_map points to Python code, which Oarlock does not execute)" if "auto_map" in raw else ""
        raise UnsupportedArchitecture(
            f'{path}: config.json names no architecture{hint}; say it with --hf-overrides \'{{"architectures": ["LlamaForCausalLM"]}}\''
        )
    return _TEXT_ARCHITECTURES.get(str(names[0]), str(names[0])), hf_config


def _sizes(path: str, hf_config: dict[str, Any]) -> dict[str, int]:
    def first(*keys: str) -> int | None:
        value = next((hf_config[key] for key in keys if hf_config.get(key) is not None), None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ModelError(f"{path}: config value {keys[0]} must be a whole number, got {value!r}")
        return value

    def needed(*keys: str) -> int:
        value = first(*keys)
        if value is None:
            raise ModelError(f"{path}: the config lacks {' or '.join(keys)}")
        if not value:
            raise ModelError(f"{path}: config value {keys[0]} must be at least 1, got 0")
        return value

    hidden, heads = needed("hidden_size", "n_embd", "d_model"), needed("num_attention_heads", "n_head", "num_heads")
    kv_heads, head_dim = first("num_key_value_heads", "n_head_kv", "num_kv_heads") or heads, first("head_dim")
    num_layers = needed("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if num_layers > MAX_LAYERS:
        raise ModelError(f"{path}: config value num_hidden_layers must be at most {MAX_LAYERS}, got {num_layers}")
    if heads % kv_heads:
        raise ModelError(f"{path}: config value num_attention_heads is {heads}, not a multiple of num_key_value_heads {kv_heads}")
    if not head_dim and hidden % heads:
        raise ModelError(f"{path}: config value hidden_size is {hidden}, not a multiple of num_attention_heads {heads}, and no head_dim is given")
    return {
        "num_layers": num_layers,
        "hidden_size": hidden,
        "intermediate_size": first("intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "vocab_size": needed("vocab_size", "n_vocab"),
    }


def _check_numbers(path: str, hf_config: dict[str, Any]) -> None:
    for key in _NUMBERS:
        value = hf_config.get(key)
        if value is not None and (not isinstance(value, int | float) or not math.isfinite(value) or value < 0):
            raise ModelError(f"{path}: config value {key} must be a number, not negative, got {value!r:.80}")


def _layer_windows(hf_config: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer. A model says it by a list, a pattern, a first layer, or by its kind alone."""
    kind, window = hf_config.get("model_type", ""), hf_config.get("sliding_window")
    if not window or not hf_config.get("use_sliding_window", kind not in _FULL_UNLESS_ASKED):
        return (None,) * num_layers
    types, pattern = hf_config.get("layer_types"), hf_config.get("sliding_window_pattern") or hf_config.get("_sliding_window_pattern")
    if isinstance(types, list):
        if len(types) != num_layers:
            raise ModelError(f"the config lists {len(types)} layer_types for {num_layers} layers")
        slides = [name == "sliding_attention" for name in types]
    elif isinstance(pattern, int) and pattern > 0:
        slides = [bool((layer + 1) % pattern) for layer in range(num_layers)]  # every pattern-th layer is full
    elif kind == "gemma2":
        slides = [layer % 2 == 0 for layer in range(num_layers)]
    elif hf_config.get("max_window_layers") is not None:
        slides = [layer >= hf_config["max_window_layers"] for layer in range(num_layers)]
    else:
        slides = [True] * num_layers
    return tuple(window if slide else None for slide in slides)


def _checkpoint_length(hf_config: dict[str, Any]) -> int:
    """The context that the config states, with rope scaling."""
    found = [hf_config[key] for key in _LENGTH_KEYS if isinstance(hf_config.get(key), int) and hf_config[key] > 0]
    if found:
        return scaled_length(hf_config, min(found))
    logger.warning(
        "the config has none of %s; the context is taken to be 2048 tokens, --max-model-len sets another", ", ".join(_LENGTH_KEYS)
    )
    return 2048


def _lengths(hf_config: dict[str, Any], config: ModelConfig, windows: tuple[int | None, ...], derived: int) -> tuple[int, int]:
    """(derived, final) maximum context; `derived` is what the config states."""
    window = min((window for window in windows if window), default=None)
    if config.disable_sliding_window and window is not None:
        if hf_config.get("rope_scaling"):
            raise ConfigError(
                "--disable-sliding-window cannot be combined with rope scaling, and this checkpoint has both; remove the flag",
                option="--disable-sliding-window",
            )
        derived = min(derived, window)
    asked = config.max_model_len
    if asked is None or asked == -1:
        return derived, derived
    if asked < 1:
        raise ConfigError(f"--max-model-len must be positive, or -1 for what fits the memory; got {asked}", option="--max-model-len")
    if asked > derived:
        override = hf_config.get("model_max_length")
        if not isinstance(override, int) or asked > override:
            cause = f" (its window, by --disable-sliding-window: {window})" if config.disable_sliding_window and window else ""
            raise ConfigError(
                f"--max-model-len {asked} is above what the checkpoint allows, {derived} tokens{cause}; "
                "use at most that, or extend the context with --rope-scaling",
                option="--max-model-len",
            )
        if config.disable_sliding_window and window is not None:
            raise ConfigError(
                f"--max-model-len {asked} needs the config's model_max_length, which cannot be combined with --disable-sliding-window; "
                f"use at most {derived}, or remove the flag",
                option="--disable-sliding-window",
            )
    return derived, asked


def _dtype(path: str, hf_config: dict[str, Any], raw: dict[str, Any]) -> str:
    value = next((c[key] for c in (hf_config, raw) for key in ("dtype", "torch_dtype") if c.get(key)), "float32")
    name = str(value).removeprefix("torch.")
    name = {"float": "float32", "half": "float16"}.get(name, name)
    if name not in ("float32", "float16", "bfloat16", "float64"):
        raise ModelError(f"{path}: config value dtype is {value!r}; float32, float16 and bfloat16 are supported")
    return "float32" if name == "float64" else name


def _ids(key: str, *sources: dict[str, Any]) -> tuple[int, ...]:
    """Token ids given as nothing, one, or a list, in order, without repeats."""
    values = [source.get(key) for source in sources]
    found = [item for value in values for item in (value if isinstance(value, list) else [value]) if item is not None]
    wrong = next((item for item in found if isinstance(item, bool) or not isinstance(item, int)), None)
    if wrong is not None:
        raise ModelError(f"config value {key} must be a token id or a list of them, got {wrong!r:.80}")
    return tuple(dict.fromkeys(found))


def _generation(config: ModelConfig, from_checkpoint: dict[str, Any]) -> dict[str, Any]:
    if config.generation_config == "auto":
        return from_checkpoint
    if config.generation_config == "none":
        return {}
    given = Path(config.generation_config)
    file = given / "generation_config.json" if given.is_dir() else given
    if not file.is_file():
        raise ConfigError(
            f"--generation-config {given}: no generation_config.json there; use auto, none or a folder", option="--generation-config"
        )
    return _read_json(file)


def _quantization(path: Path, raw: dict[str, Any], from_file: bool) -> dict[str, Any] | None:
    """From config.json, else from the separate files that older tools wrote."""
    found = raw.get("quantization_config") or raw.get("compression_config")
    if found is None and not from_file:
        separate = [path / name for name in ("quantize_config.json", "quant_config.json") if (path / name).is_file()]
        if len(separate) > 1:
            raise ModelError(f"{path} has both {separate[0].name} and {separate[1].name}; remove the one that does not belong to it")
        found = _read_json(separate[0]) if separate else None
    return found
