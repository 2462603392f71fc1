"""The threads in which long texts are tokenised, so that an event loop stays free.

Owns: how many texts are worked on at once.
Reads: nothing.
Never: knows a tokenizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

# Tokenising takes up to 300 bytes of memory for each character while it runs, and the C library keeps an arena for each thread.
# The loop's own executor would begin up to 32 texts at once.
MAX_AT_ONCE = 2
_threads = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="oarlock-text")


async def in_text_thread(call: Callable[[], Result]) -> Result:
    """The result of `call`, run in one of MAX_AT_ONCE threads; others wait their turn, and a caller that is cancelled before it has none."""
    return await asyncio.get_running_loop().run_in_executor(_threads, call)
