"""What fewer bits cost: the perplexity of a text under one model, as its checkpoint is and quantised when it is read.

Owns: the text, and the table.
Reads: `oarlock.LLM`.
Never: passes or fails.

    python benchmarks/quantization_quality.py MODEL [--methods none int8 int4] [--tokens 3072] [--device cpu] [--text FILE] [--rescaled FOLDER]

The text is this repository's own: guides and source in turns, the same for every method, cut into windows of --window tokens. The perplexity is exp(-mean log-probability) of
every token but the first of each window. Its changes between methods mean more than its size.

A 16-bit checkpoint that was once dequantised from 4 bits still lies on a grid, which int4 finds again and loses nothing by. --rescaled writes a copy of it (Llama's and
Qwen2's names) that computes the same without the grid: inputs of linears are multiplied by random factors, which norms or the linears before are divided by.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from pathlib import Path

from oarlock import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "core/oarlock/scheduler/scheduler.py", "docs/architecture.md", "core/oarlock/kv/manager.py", "docs/server.md", "core/oarlock/frontend/chat.py")


def made_text() -> str:
    """About 3,000 letters of each page, in turns of a page."""
    return "\n\n".join((ROOT / page).read_text(encoding="utf-8")[:3000] for page in PAGES)


def rescaled(source: Path, target: Path, spread: float = 0.2) -> None:
    """Write the copy, with factors of exp(spread * normal)."""
    import torch
    from safetensors.torch import load_file, save_file

    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, target / file.name)
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads

    def move(size: int, before: tuple[str, ...], after: tuple[str, ...], repeats: int = 1) -> None:
        """Divide rows (or numbers) of what comes before, and multiply columns of what comes after, where each number feeds several heads' columns."""
        factor = torch.exp(torch.randn(size, generator=generator) * spread)
        columns = factor.view(-1, 1, head_dim).expand(-1, repeats, -1).flatten() if repeats > 1 else factor
        for name in before:
            if name in tensors:
                old = tensors[name]
                tensors[name] = (old.float() / (factor[:, None] if old.dim() == 2 else factor)).to(old.dtype)
        for name in after:
            tensors[name] = (tensors[name].float() * columns).to(tensors[name].dtype)

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        move(hidden, (f"{at}input_layernorm.weight",), tuple(f"{attention}{part}_proj.weight" for part in "qkv"))
        move(hidden, (f"{at}post_attention_layernorm.weight",), (f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"))
        move(kv_heads * head_dim, (f"{attention}v_proj.weight", f"{attention}v_proj.bias"), (f"{attention}o_proj.weight",), heads // kv_heads)
        move(config["intermediate_size"], (f"{mlp}up_proj.weight",), (f"{mlp}down_proj.weight",))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def log_probability(llm: LLM, windows: list[list[int]]) -> tuple[float, int]:
    """(sum over all tokens but the first of each window, how many they are)."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)
    total, count = 0.0, 0
    for out, window in zip(llm.generate(prompt_token_ids=windows, sampling_params=params, use_tqdm=False), windows, strict=True):
        rows = (out.prompt_logprobs or [])[1:]
        total += sum(row[token].logprob for row, token in zip(rows, window[1:], strict=True) if row is not None)
        count += len(rows)
    return total, count


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity of a text under a model, in 16 bits and in fewer.")
    parser.add_argument("model")
    parser.add_argument("--methods", nargs="+", default=["none", "int8", "int4"], help="values of --quantization; none: as the checkpoint is")
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--text", type=Path, help="a file in place of the made text")
    parser.add_argument("--rescaled", type=Path, help="a folder for a rescaled copy of the checkpoint; nothing is measured")
    args = parser.parse_args()
    if args.rescaled:
        rescaled(Path(args.model), args.rescaled)
        return
    text = args.text.read_text(encoding="utf-8") if args.text else made_text()
    print(f"{args.model}, {args.device}, {args.dtype}\n\n| method | perplexity | change | load and score, s |\n|---|---|---|---|")
    first: float | None = None
    for method in args.methods:
        started = time.perf_counter()
        options = {"quantization": None if method == "none" else method, "max_model_len": args.window, "max_num_seqs": 2}
        with LLM(args.model, device=args.device, dtype=args.dtype, **options) as llm:
            ids = llm.get_tokenizer().encode(text)[: args.tokens]
            loaded = time.perf_counter()
            total, count = log_probability(llm, [ids[at : at + args.window] for at in range(0, len(ids) - 1, args.window)])
        perplexity = math.exp(-total / count)
        first = first or perplexity
        print(f"| {method} | {perplexity:.4f} | {perplexity / first - 1:+.2%} | {loaded - started:.1f} + {time.perf_counter() - loaded:.1f} |", flush=True)


if __name__ == "__main__":
    main()
