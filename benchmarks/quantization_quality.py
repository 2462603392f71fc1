"""What fewer bits cost: the perplexity of a text under one model, as its checkpoint is and quantised when it is read.

Owns: the text, and the table.
Reads: `oarlock.LLM`.
Never: passes or fails.

    python benchmarks/quantization_quality.py MODEL [--methods none int8 int4] [--tokens 3072] [--device cpu] [--text FILE]

The text is this repository's own: guides and source in turns, the same for every method, cut into windows of --window tokens. The perplexity is exp(-mean log-probability) of
every token but the first of each window. Its changes between methods mean more than its size.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from oarlock import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "core/oarlock/scheduler/scheduler.py", "docs/architecture.md", "core/oarlock/kv/manager.py", "docs/server.md", "core/oarlock/frontend/chat.py")


def made_text() -> str:
    """About 3,000 letters of each page, in turns of a page."""
    return "\n\n".join((ROOT / page).read_text(encoding="utf-8")[:3000] for page in PAGES)


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
    args = parser.parse_args()
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
