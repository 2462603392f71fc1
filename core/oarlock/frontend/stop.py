"""Finds stop strings in text that arrives in pieces, and says how much of it is safe to send.

Owns: the state of the search.
Reads: nothing.
Never: knows tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Reads text character by character, so the result does not depend on how the text was cut into tokens.

    The match that ends first wins; of two that end together, the longer one. One Knuth-Morris-Pratt automaton a stop
    string: O(1) amortised for each character and string, whatever the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._borders = [_borders(stop) for stop in self.stops]
        self._matched = [0] * len(self.stops)  # how many characters of each stop string the text ends with

    @property
    def held(self) -> int:
        """Characters at the end of the text so far that may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str, *, armed: bool = True) -> tuple[int, str] | None:
        """Read on. Returns (characters of `text` up to the end of the match, the stop string), or None.

        While not `armed` (min_tokens not reached), matches that complete are passed over; one that completes later
        may have begun here. After a match the state is spent.
        """
        if not self.stops:
            return None
        for position, char in enumerate(text):
            found = ""
            for which, stop in enumerate(self.stops):
                borders, matched = self._borders[which], self._matched[which]
                while matched and stop[matched] != char:
                    matched = borders[matched - 1]
                if stop[matched] == char:
                    matched += 1
                if matched == len(stop):
                    if armed and len(stop) > len(found):
                        found = stop
                    matched = borders[matched - 1]
                self._matched[which] = matched
            if found:
                return position + 1, found
        return None


def _borders(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = borders[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        borders[i] = length
    return borders
