"""A checkpoint that says what a test wants: real files, a real tokenizer, a real model, whose every next token hangs on the last one alone.

Its attention and its perceptrons add nothing, so the hidden state is the last token's embedding, and the row of the output head for a
token is the embedding of the token before it. The last message's text names the script; each script is cut into pieces that occur
once, which are tokens of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, HEADS, HEAD_DIM = 256, 2, 16
EOS = "<|end|>"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|' + messages[-1].content + '|>' }}{% endif %}"
)


def cut_into_pieces(text: str, taken: set[str]) -> list[str]:
    """Pieces of about four characters, none of which is in `taken`, to which they are added."""
    pieces: list[str] = []
    at = 0
    while at < len(text):
        size = 4
        while at + size < len(text) and text[at : at + size] in taken:
            size += 1
        piece = text[at : at + size]
        if piece in taken:  # the end: it joins the piece before it
            piece = pieces.pop() + piece
        assert piece not in taken, piece
        pieces.append(piece)
        taken.add(piece)
        at += size
    return pieces


def make_scripted_model(folder: Path, scripts: Mapping[str, str], max_len: int = 2048) -> Path:
    """Writes the checkpoint and returns its folder. `scripts`: what a user's message says -> what the model answers."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    taken: set[str] = set()
    cuts = {name: cut_into_pieces(text, taken) for name, text in scripts.items()}
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (EOS, *(f"<|{name}|>" for name in scripts))])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for pieces in cuts.values() for piece in pieces])
    vocab_size = tokenizer.get_vocab_size()

    rng = np.random.default_rng(11)
    embedding = rng.choice([-1.0, 1.0], (vocab_size, HIDDEN)).astype(np.float32)
    head = np.zeros((vocab_size, HIDDEN), np.float32)
    for name, pieces in cuts.items():
        chain = [tokenizer.token_to_id(text) for text in (f"<|{name}|>", *pieces, EOS)]
        for before, after in zip(chain, chain[1:], strict=False):  # noqa: RUF007  pairwise reads no better
            head[after] += embedding[before]
    at = "model.layers.0."
    zeros, ones = np.zeros, np.ones(HIDDEN, np.float32)
    weights = {
        "model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": ones,
        at + "input_layernorm.weight": ones, at + "post_attention_layernorm.weight": ones.copy(),
        **{f"{at}self_attn.{name}_proj.weight": zeros((HEADS * HEAD_DIM, HIDDEN), np.float32) for name in "qkv"},
        at + "self_attn.o_proj.weight": zeros((HIDDEN, HEADS * HEAD_DIM), np.float32),
        **{f"{at}mlp.{name}_proj.weight": zeros((32, HIDDEN), np.float32) for name in ("gate", "up")},
        at + "mlp.down_proj.weight": zeros((HIDDEN, 32), np.float32),
    }  # fmt: skip
    save_file({name: value.copy() for name, value in weights.items()}, folder / "model.safetensors")
    eos_id = tokenizer.token_to_id(EOS)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "vocab_size": vocab_size, "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": eos_id,
    }  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "chat_template": TEMPLATE}
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in (("config.json", config), ("tokenizer_config.json", settings), ("generation_config.json", {"eos_token_id": eos_id})):
        (folder / name).write_text(json.dumps(value))
    return folder
