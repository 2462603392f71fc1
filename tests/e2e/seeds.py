"""Every seed and every prompt length of the end-to-end tests. They were written down before the first run and are not to be tuned.

A reference that turns out too dull (fewer than 16 distinct tokens) is mended where weights are drawn, in
tests/runtime/checkpoints.py, whose seeds are all 0; never here.
"""

from __future__ import annotations

PROMPTS = 20240611  # token ids of every prompt
SAMPLED = 90210  # first seed of sampled requests
TRAFFIC = 4711  # the thousand random requests
TAILS = 1913  # what follows a shared prefix

# 1 to 600 tokens: around the block sizes (8, 12, 16, 32), around the windows (16), and well beyond both.
MIXED = (
    600, 1, 350, 2, 200, 3, 129, 5, 128, 7, 120, 8, 100, 9, 90, 12, 75, 13, 65, 15, 64, 16, 63, 17, 48, 20, 40, 24, 33, 25, 32, 31,
)  # fmt: skip
FEW = (600, 1, 17, 40, 129)  # the base run of every family
SHORT_CONTEXT = (180, 1, 17, 40, 129)  # for checkpoints whose rotary factors change beyond 256 tokens
CROWD = (129, 90, 75, 64, 40, 24, 17, 5)  # together they need far more blocks than there are
