"""What differs from step to step, so that kernels are compiled for all steps at once: `@triton.jit(**STEPWISE)`.

Owns: the names of those arguments.
Reads: nothing.
Never: names a stride, or a pointer to large data: there Triton must know what is aligned.

Triton compiles a kernel anew for a number that is 1, a multiple of 16 or neither, and for a pointer that is aligned or not. Of a step's numbers of
rows and tokens, and of the pointers into its one packed buffer of inputs, every step would bring another mixture: requests would wait for the
compiler while they are served.
"""

from __future__ import annotations

NUMBERS = ("num_rows", "num_tokens", "rows", "tokens", "num_blocks", "length", "entries", "pairs", "tiles", "programs", "parts", "k", "each", "stride_tr", "stride_ids",
           "stride_values", "stride_history")  # fmt: skip
POINTERS = (
    # inputs of a step
    "table_ptr", "seq_lens_ptr", "starts_ptr", "slots_ptr", "positions_ptr", "temperature_ptr", "top_p_ptr", "top_k_ptr", "min_p_ptr", "seed_ptr",
    "choice_ptr", "position_ptr", "presence_ptr", "frequency_ptr", "repetition_ptr", "prompt_len_ptr", "total_len_ptr", "bits_ptr", "ids_ptr",
    "bias_values_ptr", "targets_ptr",
    # a few numbers of each row, several in one allocation
    "numbers_ptr", "best_ptr", "end_ptr", "last_ptr", "whole_ptr", "maximum_ptr", "mass_ptr", "greater_ptr", "noisy_ptr", "scaled_ptr", "token_ptr",
)  # fmt: skip
STEPWISE = {"do_not_specialize": NUMBERS, "do_not_specialize_on_alignment": POINTERS}
