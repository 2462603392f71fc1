"""Twenty prompts for real models: questions, code, lists, several languages, one word, and texts of several hundred tokens."""

from __future__ import annotations

_HARBOUR = (
    "The harbour of the old town wakes before the sun. First come the bakers, whose ovens have been warm since three, then the men who "
    "unload the night boats, and last the gulls, which know to the minute when the first crates are opened. A visitor who stands on the "
    "stone steps by the customs house can watch the whole trade of the valley pass in an hour: apples and pears in autumn, barrels of "
    "herring in spring, timber all year round. "
)
_MINUTES = "".join(
    f"Item {n}. The committee heard the report on {what}, asked about the cost, and agreed to come back to it in {month}. "
    for n, (what, month) in enumerate(
        (("the bridge", "March"), ("street lamps", "April"), ("the school roof", "May"), ("the summer fair", "June"), ("flood walls", "July"),
         ("the library's opening hours", "August"), ("a new bus stop", "September"), ("bicycle lanes", "October"), ("the market hall", "November"),
         ("the winter road service", "December"), ("the town archive", "January"), ("tree planting", "February")), 1,
    )
)  # fmt: skip

PROMPTS = (
    "The",
    "The capital of France is",
    "List three uses of a rope on a sailing boat:\n1.",
    "Question: Why does ice float on water?\nAnswer:",
    "def fibonacci(n: int) -> int:\n    \"\"\"The n-th Fibonacci number.\"\"\"\n",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "import numpy as np\n\ndef softmax(x):\n",
    "Once upon a time, in a village between two rivers, there lived a clockmaker who",
    "Translate to German: Good morning, how are you?\n",
    "Il était une fois un petit prince qui",
    "从前有一座山，山里有一座庙，",
    "Дорогой дневник, сегодня",
    "{\"name\": \"Ada\", \"born\": 1815, \"works\": [",
    "Dear Sir or Madam,\n\nI am writing to you about the washing machine that I bought from your shop last week. It",
    "2, 4, 8, 16, 32,",
    "Q: A train leaves at 9:40 and arrives at 12:05. How long does the journey take?\nA: Let us count:",
    _HARBOUR + "On the day of this story, however,",
    _HARBOUR + "By evening everything is quiet again, and",
    _HARBOUR * 2 + "In short,",
    "Minutes of the town council.\n" + _MINUTES * 2 + "\nSummary:",
)  # fmt: skip
