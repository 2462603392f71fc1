"""A small Llama checkpoint with a chat template, made from a seed: real files, real tokenizer, meaningless text.

Its tokenizer has the 256 bytes and the pairs that a few sentences teach it. The rows of non-ASCII bytes in the output head are
zero, so that plain requests answer in ASCII and only a bias leads into half characters.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 2, 4, 2, 16, 128
MAX_LEN = 2048
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_ID = 2
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SENTENCES = [
    "The capital of France is Paris.", "Name three colours.", "List the months of the year:", "red green blue yellow", "One plus one is two",
    "Apples are Rivers flow Two plus two", "Explain rain in one sentence.", "What is the weather in Oslo for 3 days?", "Be brief. Hi word",
]  # fmt: skip


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=448, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=1, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return tokenizer


def make_tiny_model(folder: Path, *, seed: int = 7, template: str = TEMPLATE) -> Path:
    """Writes the checkpoint and returns its folder. Deterministic."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    head = normal(vocab_size, HIDDEN, scale=0.6)
    for token, token_id in tokenizer.get_vocab().items():
        if not tokenizer.decoder.decode([token]).isascii():
            head[token_id] = 0.0
    weights = {"model.embed_tokens.weight": normal(vocab_size, HIDDEN, scale=1.0), "lm_head.weight": head, "model.norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            at + "self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN, scale=0.3),
            at + "self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN, scale=0.3),
            at + "self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN, scale=0.3),
            at + "self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM, scale=0.3),
            at + "mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN, scale=0.2),
            at + "mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN, scale=0.2),
            at + "mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE, scale=0.2),
            at + "input_layernorm.weight": np.ones(HIDDEN, np.float32),
            at + "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        }
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "vocab_size": vocab_size, "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": EOS_ID,
    }  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[EOS_ID], "chat_template": template}
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in (("config.json", config), ("tokenizer_config.json", settings), ("generation_config.json", {"eos_token_id": EOS_ID})):
        (folder / name).write_text(json.dumps(value))
    return folder
