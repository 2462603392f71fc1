"""Option table: LoRA, structured output, image input, speculation.

Owns: these rows. All but structured output are refused until their features are built; each still parses with its default and choices.
Reads: `config.option`.
Never: holds logic beyond a value's mapping.
"""

from __future__ import annotations

from functools import partial

from oarlock.config.option import Option
from oarlock.structured_outputs import BACKENDS

_lora = partial(Option, group="LoRA", fate="refused", feature="LoRA adapters", remedy="leave it out, or merge the adapter into the checkpoint first")
_image = partial(Option, group="Image input", fate="refused", feature="image input")
_speculation = partial(Option, group="Speculation", fate="refused", feature="speculative decoding")

OPTIONS: tuple[Option, ...] = (
    _lora("enable-lora", "bool", False, "Serve LoRA adapters."),
    _lora("max-loras", "int", 1, "Most adapters in one batch.", low=1),
    _lora("max-lora-rank", "int", 16, "Largest rank of an adapter.", low=1),
    _lora("lora-extra-vocab-size", "int", 256, "Most tokens that an adapter adds.", choices=(0, 256, 512)),
    _lora("lora-dtype", "str", "auto", "Data type of adapters; auto: the model's.", choices=("auto", "float16", "bfloat16", "float32")),
    _lora("long-lora-scaling-factors", "floats", None, "Rotary scaling factors that adapters may choose: 4.0,8.0 or a JSON list."),
    _lora("max-cpu-loras", "int", None, "Adapters kept in host memory. Unset: --max-loras.", low=1),
    _lora("fully-sharded-loras", "bool", False, "Shard both matrices of an adapter over the devices."),
    _lora("lora-modules", "words", (), "Adapters by name: NAME=PATH …", offline=False),
    Option(
        "guided-decoding-backend", "str", "auto", "Which backend constrains answers to a schema, pattern or grammar, where a request names none; "
        "auto: llguidance, else another that is installed. Each comes with pip install ./plugins/structured_output.",
        "model.guided_decoding_backend", group="Structured output", aliases=("structured-outputs-backend", "structured-outputs-config.backend"),
        choices=("auto", "llguidance", "guidance", "outlines", "lm-format-enforcer", "lmfe", "xgrammar"),
        built=("llguidance", "guidance", "outlines", "lm-format-enforcer", "lmfe"), feature="backend xgrammar, which needs torch and transformers "
        "in the process that compiles grammars", remedy="use llguidance, which takes the same schemas, patterns and grammars",
        store=lambda value: BACKENDS.get(value, value), extended_by="structured_output",
    ),
    _image("image-input-type", "str", None, "What an image is given as.", choices=("pixel_values", "image_features")),
    _image("image-token-id", "int", None, "Token that stands for an image."),
    _image("image-input-shape", "str", None, "Largest image: 1,3,336,336."),
    _image("image-feature-size", "int", None, "Tokens that an image takes."),
    _image("image-processor", "str", None, "Hub name or folder of the image processor. Unset: the model's."),
    _image("image-processor-revision", "str", None, "Branch, tag or commit of the image processor."),
    _image("disable-image-processor", "bool", False, "Use no image processor."),
    _speculation("speculative-config", "object", None, "JSON object that describes speculation."),
    _speculation("speculative-model", "str", None, "Draft model, or [ngram]."),
    _speculation("num-speculative-tokens", "int", None, "Tokens drafted at a time.", low=1),
    _speculation("speculative-draft-tensor-parallel-size", "int", None, "Devices that share the draft model.", aliases=("spec-draft-tp",), low=1),
    _speculation("speculative-max-model-len", "int", None, "Longest sequence that is still speculated on.", low=1),
    _speculation("speculative-disable-by-batch-size", "int", None, "Queue length from which speculation is off.", low=1),
    _speculation("ngram-prompt-lookup-max", "int", None, "Longest n-gram looked up in the prompt.", low=1),
    _speculation("ngram-prompt-lookup-min", "int", None, "Shortest n-gram looked up in the prompt.", low=1),
    _speculation(
        "spec-decoding-acceptance-method", "str", "rejection_sampler", "How drafted tokens are accepted.",
        choices=("rejection_sampler", "typical_acceptance_sampler"),
    ),
    _speculation("typical-acceptance-sampler-posterior-threshold", "float", None, "Least posterior probability of an accepted token.", low=0),
    _speculation("typical-acceptance-sampler-posterior-alpha", "float", None, "Entropy factor of the threshold.", low=0),
)  # fmt: skip
