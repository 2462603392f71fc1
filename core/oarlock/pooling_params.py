"""What a caller may ask of a vector, and what a checkpoint says of the vectors that it was trained to give.

Owns: `PoolingParams`, `Pooler` and how it is read from config.json and from the files that sentence-transformers writes.
Reads: `errors`; a checkpoint's folder, once, when an engine starts.
Never: computes a vector (`runtime.pooling` does); imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from oarlock.errors import ConfigError, InvalidParameter

Task = Literal["embed", "classify"]
Pooling = Literal["last", "mean", "cls"]
Activation = Literal["none", "normalize", "sigmoid", "softmax"]

_ROLES: tuple[tuple[str, Literal["embed", "classify"]], ...] = (("ForSequenceClassification", "classify"), ("TextModel", "embed"), ("Model", "embed"))
_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}  # sentence-transformers' name -> ours
_MODE_KEYS = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "lasttoken", "max_tokens": "max", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean_tokens": "weightedmean"}
_CONFIG_KEYS = {"pooling_type": "pooling", "seq_pooling_type": "pooling", "use_activation": "use_activation", "normalize": "use_activation", "dimensions": "dimensions"}
_ACTIVATIONS: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}  # torch.nn's name -> ours


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """A vector instead of tokens. None: as the checkpoint has it.

    Raises:
        InvalidParameter: a field is not valid; whether the model can honour it is `Pooler.fit`'s to say.
    """

    task: Task | None = None  # embed: hidden states; classify: the classification head's logits
    pooling: Pooling | None = None  # the last token's, the mean of all tokens', the first token's
    use_activation: bool | None = None  # embed: to length 1; classify: to probabilities. None: as the checkpoint has it, mostly true
    dimensions: int | None = None  # the vector's first entries, for models whose vectors may be cut (Kusupati et al. 2022, arXiv:2205.13147)
    truncate_prompt_tokens: int | None = None  # longer prompts are cut to so many tokens; -1: to the context
    truncation_side: Literal["left", "right"] = "right"  # which end is cut off; tokens that the tokenizer adds stay
    activation: Activation = "none"  # what the worker does; set by `Pooler.fit`

    def __post_init__(self) -> None:
        for name, allowed in (("task", get_args(Task)), ("pooling", get_args(Pooling)), ("truncation_side", ("left", "right"))):
            value = getattr(self, name)
            if value not in allowed and (value is not None or name == "truncation_side"):
                raise InvalidParameter(f"{name} is {value!r:.80}; it must be one of {', '.join(allowed)}.", param=name)
        for name, least in (("dimensions", 1), ("truncate_prompt_tokens", -1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least or (name != "dimensions" and value == 0)):
                raise InvalidParameter(f"{name} is {value!r:.80}; it must be a whole number of at least 1{', or -1' if least < 0 else ''}.", param=name)


def role_of(architecture: str) -> tuple[str, Literal["generate", "embed", "classify"]]:
    """(the same architecture with a language-model head, what this one gives: tokens and vectors, vectors, or classes)."""
    for suffix, role in _ROLES:
        base = architecture.removesuffix(suffix)
        if base != architecture and not architecture.endswith("LMHeadModel"):
            return ("GPT2LMHeadModel" if base == "GPT2" else f"{base}ForCausalLM"), role
    return architecture, "generate"


def read_pooler_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of PoolingParams that --pooler-config sets for every request. Raises ConfigError."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = _CONFIG_KEYS.get(key)
        if name is None:
            raise ConfigError(f"--pooler-config has the key {key!r:.80}; served are {', '.join(_CONFIG_KEYS)}", option="--pooler-config")
        found[name] = value.lower() if name == "pooling" and isinstance(value, str) else value
        if name == "use_activation" and type(value) is not bool:
            raise ConfigError(f"--pooler-config: {key} is {value!r:.80}; it must be true or false", option="--pooler-config")
    try:
        PoolingParams(**found)
    except InvalidParameter as error:
        raise ConfigError(f"--pooler-config: {error}", option="--pooler-config") from None
    return found


@dataclass(frozen=True, slots=True)
class Pooler:
    """How one checkpoint makes its vectors."""

    role: Literal["generate", "embed", "classify"] = "generate"
    pooling: Pooling = "last"
    normalize: bool = True
    size: int = 0  # numbers of an embedding
    may_cut: bool = False  # embeddings may be cut to any `dimensions`
    cuts: tuple[int, ...] = ()  # or to these only
    labels: tuple[str, ...] = ()  # of the classes
    activation: Activation = "softmax"  # of the classes
    problem: str = ""  # why no vector can be had; generation is not concerned
    asked: Mapping[str, Any] = field(default_factory=dict)  # --pooler-config

    @property
    def task(self) -> Task:
        return "classify" if self.role == "classify" else "embed"

    @classmethod
    def of(cls, architecture: str, hf_config: dict[str, Any], path: str, asked: Mapping[str, Any]) -> Pooler:
        """From config.json and, where it is there, what sentence-transformers says in modules.json and the folders that it names."""
        role = role_of(architecture)[1]
        cuts = tuple(n for n in hf_config.get("matryoshka_dimensions") or () if type(n) is int)
        size = hf_config.get("word_embed_proj_dim") or hf_config.get("hidden_size") or hf_config.get("n_embd") or 0
        own = cls(role, size=size, may_cut=bool(hf_config.get("is_matryoshka")) or bool(cuts), cuts=cuts, asked=asked)
        if role == "classify":
            return _with_classes(own, hf_config)
        return _with_modules(own, Path(path))

    def fit(self, params: PoolingParams) -> PoolingParams:
        """Every field as it will be done. Raises InvalidParameter for what this checkpoint cannot give."""
        if self.problem:
            raise InvalidParameter(f"this model gives no vectors: {self.problem}.", param="model", code="unsupported_field")
        params = replace(params, **{name: value for name, value in self.asked.items() if getattr(params, name) is None})
        task = params.task or self.task
        if task != self.task:
            why = "has no classification head; it gives embeddings" if task == "classify" else "is a classifier; it gives scores and classes, not embeddings"
            raise InvalidParameter(f"this model {why}.", param="model", code="unsupported_field")
        if task == "classify":
            if params.dimensions is not None:
                raise InvalidParameter("dimensions: classes cannot be cut; leave it out.", param="dimensions")
            activation: Activation = "none" if params.use_activation is False else self.activation
        else:
            self._check_dimensions(params.dimensions)
            activation = "normalize" if (self.normalize if params.use_activation is None else params.use_activation) else "none"
        return replace(params, task=task, pooling=params.pooling or self.pooling, activation=activation)

    def _check_dimensions(self, wanted: int | None) -> None:
        if wanted is None or wanted == self.size:
            return
        if wanted > self.size:
            raise InvalidParameter(f"dimensions is {wanted}, but this model's vectors have {self.size}; ask for at most that.", param="dimensions")
        if not self.may_cut:
            text = (
                f"dimensions is {wanted}, but this model's vectors of {self.size} are not said to keep their sense when they are cut; leave it out, or "
                "start the server with --hf-overrides '{\"is_matryoshka\": true}' where the model was trained for it."
            )
            raise InvalidParameter(text, param="dimensions", code="unsupported_field")
        if self.cuts and wanted not in self.cuts:
            raise InvalidParameter(f"dimensions is {wanted}; this model's vectors may be cut to {', '.join(map(str, self.cuts))}.", param="dimensions")


def _with_classes(own: Pooler, hf_config: dict[str, Any]) -> Pooler:
    names = hf_config.get("id2label")
    if isinstance(names, dict) and names:
        labels = tuple(str(name) for _, name in sorted(names.items(), key=lambda item: int(item[0])))
    else:
        labels = tuple(f"LABEL_{n}" for n in range(hf_config.get("num_labels") or 2))  # transformers' own default is two
    asked = (hf_config.get("sentence_transformers") or {}).get("activation_fn") or hf_config.get("sbert_ce_default_activation_function")
    if asked:
        known = _ACTIVATIONS.get(str(asked).rpartition(".")[2])
        problem = "" if known else f"config.json asks for the activation {asked!r:.80}, and served are {', '.join(_ACTIVATIONS)}"
        return replace(own, labels=labels, activation=known or "none", problem=problem)
    by_problem: dict[Any, Activation] = {"regression": "none", "multi_label_classification": "sigmoid"}
    return replace(own, labels=labels, activation=by_problem.get(hf_config.get("problem_type"), "sigmoid" if len(labels) == 1 else "softmax"))


def _with_modules(own: Pooler, folder: Path) -> Pooler:
    """sentence-transformers keeps a list of steps: the transformer, a pooling, perhaps to length 1, perhaps more linears, which are not served."""
    try:
        if not (folder / "modules.json").is_file():
            return own
        steps = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        kinds = [str(step["type"]).rpartition(".")[2] for step in steps]
        pooling: dict[str, Any] = next((json.loads((folder / step["path"] / "config.json").read_text(encoding="utf-8")) for step, kind in zip(steps, kinds, strict=True) if kind == "Pooling"), {})
    except (OSError, ValueError, LookupError, TypeError) as error:
        return replace(own, problem=f"{folder}/modules.json and the folders that it names cannot be read: {type(error).__name__}: {error}")
    odd = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    modes = [name for key, name in _MODE_KEYS.items() if pooling.get(f"pooling_mode_{key}")] or [pooling.get("pooling_mode", "mean" if pooling else "lasttoken")]
    if odd or len(modes) != 1 or modes[0] not in _MODES:
        what = f"steps of the kind {', '.join(odd)}" if odd else f"pooling of the kind {', '.join(map(str, modes))}"
        return replace(own, problem=f"its modules.json asks for {what}, which is not served (pooling: {', '.join(_MODES)})")
    return replace(own, pooling=_MODES[modes[0]], normalize="Normalize" in kinds)
