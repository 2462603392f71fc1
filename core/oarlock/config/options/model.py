"""Option table: model, tokenizer, loading, quantization.

Owns: these rows.
Reads: `config.option`.
Never: holds logic beyond a value's mapping.
"""

from __future__ import annotations

from functools import partial

from oarlock.config.option import Option

DEFAULT_MODEL = "facebook/opt-125m"
_DTYPES = {"half": "float16", "float": "float32"}

_option = partial(Option, group="Model, tokenizer, loading")

OPTIONS: tuple[Option, ...] = (
    _option("model", "str", DEFAULT_MODEL, "Hub name, folder or .gguf file. Also the positional argument of `serve`.", "model.model"),
    _option("tokenizer", "str", None, "Hub name or folder of the tokenizer. Unset: the model's.", "model.tokenizer"),
    _option("skip-tokenizer-init", "bool", False, "Load no tokenizer: prompts are token ids, answers are token ids.", "model.skip_tokenizer_init"),
    _option("revision", "str", None, "Branch, tag or commit of the model.", "model.revision"),
    _option(
        "code-revision", "str", None, "Branch, tag or commit of the model's own code, with --trust-remote-code.", "model.code_revision",
        fate="refused", feature="loading of a checkpoint's code from a revision of its own", remedy="use --revision for weights and code together",
    ),
    _option("tokenizer-revision", "str", None, "Branch, tag or commit of the tokenizer. Unset: --revision.", "model.tokenizer_revision"),
    _option(
        "tokenizer-mode", "str", "auto", "auto: the fast tokenizer; slow: the Python one, where there is one.", "model.tokenizer_mode",
        choices=("auto", "slow"),
    ),
    _option("trust-remote-code", "bool", False, "Allow code that comes with the checkpoint to run, where a model needs it.", "model.trust_remote_code"),
    _option("download-dir", "str", None, "Where downloads are kept. Unset: the hub's own cache.", "model.download_dir"),
    _option(
        "load-format", "str", "auto", "Which weight files are read. auto: safetensors, else PyTorch files; a .gguf file is known by its name.",
        "model.load_format",
        choices=("auto", "pt", "safetensors", "npcache", "dummy", "tensorizer", "bitsandbytes", "sharded_state"),
        built=("auto", "pt", "safetensors", "npcache", "dummy"),
        feature="loader for that format", remedy="use auto, safetensors, pt, npcache or dummy",
    ),
    _option(
        "model-loader-extra-config", "object", None, "JSON object for the loaders tensorizer and bitsandbytes.",
        fate="refused", feature="loader that takes extra settings",
    ),
    _option(
        "qlora-adapter-name-or-path", "str", None, "Adapter of a QLoRA checkpoint.", fate="refused", feature="QLoRA loading",
        remedy="leave it out, or merge the adapter into the checkpoint first",
    ),
    _option(
        "dtype", "str", "auto", "auto: the checkpoint's dtype if the device is fast at it, else the device's preferred one. half is float16, "
        "float is float32.", "model.dtype",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"), store=lambda value: _DTYPES.get(value, value),
    ),
    _option(
        "max-model-len", "length", None, "Longest prompt and answer together, in tokens (4096, 4k, 4K). Unset: from the checkpoint; "
        "auto or -1: what fits the memory.", "model.max_model_len", low=1,
    ),
    _option("seed", "int", 0, "Seed of requests that bring none.", "model.seed"),
    _option(
        "rope-scaling", "object", None, 'Replaces the checkpoint\'s rope_scaling: {"rope_type": "linear", "factor": 2.0}; "type" is accepted too.',
        "model.rope_scaling",
    ),
    _option("rope-theta", "float", None, "Replaces the checkpoint's rope_theta.", "model.rope_theta", low=0, low_open=True),
    _option("hf-overrides", "object", {}, "JSON object laid over the checkpoint's config.json.", "model.hf_overrides"),
    _option(
        "pooler-config", "object", {}, 'How prompts become vectors, where it is not as the checkpoint says: {"pooling_type": "MEAN", "use_activation": true, '
        '"dimensions": 256}; pooling_type is LAST, MEAN or CLS, and use_activation false leaves embeddings at their length and scores as logits.', "model.pooler_config",
    ),
    _option(
        "max-logprobs", "int", 20, "Most logprobs that a request may ask for; -1: no cap.", "model.max_logprobs", low=-1,
    ),
    _option(
        "max-logprob-entries", "int", 1 << 23, "Most logprobs of one request, all its prompts' positions together: (prompt_logprobs + 1) × prompt "
        "tokens, and (logprobs + 1) × max_tokens × choices. Also the most prompt logprobs of all open HTTP requests together.", "model.max_logprob_entries", low=1,
    ),
    _option(
        "disable-sliding-window", "bool", False, "Full attention in every layer; the context is capped to the window.",
        "model.disable_sliding_window",
    ),
    _option(
        "served-model-name", "words", (), "One or more names that requests may use; the first is the name in answers and metrics. "
        "Unset: the model as given.", "model.served_model_name",
    ),
    _option(
        "generation-config", "str", "auto", "Sampling defaults: auto takes the checkpoint's generation_config.json, none takes none, or a folder "
        "that holds such a file.", "model.generation_config", store=lambda value: "none" if value == "vllm" else value,
    ),
    _option(
        "quantization", "str", None, "How the weights are quantized. int8 and int4: a checkpoint that is not, while it is read. gptq (or "
        "gptq_marlin), compressed-tensors, or what an installed plugin reads: as the checkpoint says, and then needed for nothing.", "model.quantization", group="Quantization", aliases=("q",),
    ),
    _option(
        "quantization-param-path", "str", None, "JSON file with scales for an fp8_e4m3 KV cache. Unset: the checkpoint's, or 1.",
        "cache.kv_scales_path", group="Quantization",
    ),
)  # fmt: skip
