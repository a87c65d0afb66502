"""Finds stop strings in growing text and says how much of the text may be shown.

One automaton (Aho and Corasick, 1975) is built per parent and shared by its children; a child keeps one
integer. Reads character by character, so the outcome cannot depend on how the text was cut. Used by `child`.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string and the number of characters of the scanned text up to its end."""

    stop: str
    end: int


class StopStrings:
    """The stop strings of one parent. Of several matches the one that ends first wins, then the longest.

    Raises ValueError when a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fall: list[int] = [0]
        self._held: list[int] = [0]
        self._stop: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()

    def __bool__(self) -> bool:
        return bool(self._next[0])

    def scan(self, state: int, text: str) -> tuple[int, StopMatch | None]:
        """Reads `text` from `state` (0 at the beginning of a child) up to the first match or the end."""
        for position, char in enumerate(text):
            state = self._step(state, char)
            if (stop := self._stop[state]) is not None:
                return state, StopMatch(stop, position + 1)
        return state, None

    def held(self, state: int) -> int:
        """Characters at the end of the text read that may be the beginning of a stop string."""
        return self._held[state]

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fall[state]
        return self._next[state].get(char, 0)

    def _add(self, stop: str) -> None:
        if not stop:
            raise ValueError("stop: a stop string is empty")
        state = 0
        for char in stop:
            state = self._next[state].get(char) or self._grow(state, char)
        self._stop[state] = stop

    def _grow(self, parent: int, char: str) -> int:
        state = self._next[parent][char] = len(self._next)
        self._next.append({})
        self._fall.append(0)
        self._held.append(self._held[parent] + 1)
        self._stop.append(None)
        return state

    def _link(self) -> None:
        """Sets where each state falls back to: its longest proper suffix that begins a stop string."""
        order = list(self._next[0].values())
        for state in order:
            for char, child in self._next[state].items():
                self._fall[child] = self._step(self._fall[state], char)
                order.append(child)
            if self._stop[state] is None:
                self._stop[state] = self._stop[self._fall[state]]
