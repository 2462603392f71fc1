"""The prompts of a benchmark: random token ids, random words, or a file. The same seed gives the same prompts.

Owns: their making, and the reading of prompt files.
Reads: nothing.
Never: tokenises; sends anything.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oarlock.errors import ConfigError

# Words that most tokenizers have whole, so that a word is about a token.
_WORDS = (
    "air area back book business car case child city company country day door eye face fact family father force friend game girl group "
    "hand head history home hour house idea job kind law level life line man member minute money month morning mother name night number "
    "office parent part party people person place point power problem program question reason research result right room school service "
    "side state story student study system teacher team thing time war water way week woman word work world year"
)
WORDS = _WORDS.split()
FIRST_ID, LAST_ID = 1000, 9999  # ids that are plain tokens in the vocabularies in use


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's input: exactly one of the first three is set."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    output_len: int = 128  # tokens asked for
    input_len: int = 0  # tokens, or words of text; where the server says better, that counts


@dataclass(frozen=True, slots=True)
class Lengths:
    """A range of lengths, drawn evenly, both ends included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, option: str) -> Lengths:
        """`128` or `64:512`.

        Raises:
            ConfigError: it is neither.
        """
        low, colon, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high if colon else low))
        except ValueError:
            raise ConfigError(f"{option} {text}: give a number of tokens such as 128, or a range such as 64:512", option) from None
        if not 1 <= lengths.low <= lengths.high:
            raise ConfigError(f"{option} {text}: must be at least 1, and the smaller number comes first", option)
        return lengths

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


def random_ids(count: int, inputs: Lengths, outputs: Lengths, *, shared: int = 0, seed: int = 0, ids: tuple[int, int] = (FIRST_ID, LAST_ID)) -> list[Prompt]:
    """Prompts of random token ids, both ends of `ids` included; the first `shared` tokens are common to all and come on top of `inputs`."""
    rng = random.Random(seed)
    prefix = [rng.randint(*ids) for _ in range(shared)]
    prompts = []
    for _ in range(count):
        tokens = prefix + [rng.randint(*ids) for _ in range(inputs.draw(rng))]
        prompts.append(Prompt(token_ids=tuple(tokens), input_len=len(tokens), output_len=outputs.draw(rng)))
    return prompts


def random_text(count: int, inputs: Lengths, outputs: Lengths, *, shared: int = 0, seed: int = 0) -> list[Prompt]:
    """Prompts of random words, about a token each."""
    rng = random.Random(seed)
    prefix = rng.choices(WORDS, k=shared)
    prompts = []
    for _ in range(count):
        words = prefix + rng.choices(WORDS, k=inputs.draw(rng))
        prompts.append(Prompt(text=" ".join(words), input_len=len(words), output_len=outputs.draw(rng)))
    return prompts


# ---------------------------------------------------------------- files
def read_prompts(path: Path, outputs: Lengths, *, seed: int = 0) -> list[Prompt]:
    """Every prompt of a file, in its order.

    A .jsonl file has a prompt a line: a string, or an object with "prompt" (text or token ids) or "messages", and perhaps
    "output_len". A .json file is a list of the same, or of conversations as ShareGPT has them, whose first message counts.

    Raises:
        ConfigError: the file cannot be read, or an entry is something else; the message names the entry.
    """
    rng = random.Random(seed)
    prompts = [_prompt(entry, f"--dataset {path}, entry {at}", outputs.draw(rng)) for at, entry in enumerate(_entries(path), 1)]
    if not prompts:
        raise ConfigError(f"--dataset {path}: no prompt in it", "dataset")
    return prompts


def _entries(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        found = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset {path}: cannot be read: {error}", "dataset") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"--dataset {path}: not JSON{' lines' if path.suffix == '.jsonl' else ''}: {error}", "dataset") from None
    if not isinstance(found, list):
        raise ConfigError(f"--dataset {path}: must hold a list of prompts", "dataset")
    return found


def _prompt(entry: Any, where: str, output_len: int) -> Prompt:
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be a string or an object", "dataset")
    wanted = entry.get("output_len", output_len)
    if type(wanted) is not int or wanted < 1:
        raise ConfigError(f"{where}: output_len is {wanted!r}; it must be a whole number of at least 1", "dataset")
    if entry.get("conversations"):
        first = entry["conversations"][0]
        return _of_text(str(first.get("value", first.get("content", ""))), where, wanted)
    if isinstance(entry.get("messages"), list) and entry["messages"]:
        words = sum(len(str(m.get("content", "")).split()) for m in entry["messages"] if isinstance(m, dict))
        return Prompt(messages=tuple(entry["messages"]), input_len=words, output_len=wanted)
    prompt = entry.get("prompt")
    if isinstance(prompt, list) and prompt and all(type(t) is int for t in prompt):
        return Prompt(token_ids=tuple(prompt), input_len=len(prompt), output_len=wanted)
    return _of_text(prompt if isinstance(prompt, str) else "", where, wanted)


def _of_text(text: str, where: str, output_len: int) -> Prompt:
    if not text.strip():
        raise ConfigError(f'{where}: has no "prompt", "messages" or "conversations" with text in it', "dataset")
    return Prompt(text=text, input_len=len(text.split()), output_len=output_len)
