"""Answers that are remembered: of a function that always says the same of the same bytes, those asked for last. Pure.

Bounded by bytes, and no question is held, only its SHA-256: whoever may ask, and be refused, chooses how long a question is.

Two generations: what is asked for is held in the younger one, and once that weighs half of what may be held it takes the place of the
older one. So several threads may ask at a time without a lock: at worst an answer is made twice.

Invariants: what is held weighs no more than `bytes_max` and the last answer of each generation. Who may call: any code.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Final, Generic, TypeVar

V = TypeVar("V")

ENTRY_BYTES: Final = 256
"""Of an entry besides its answer, about: the hash, a tuple, a place in the table."""


def digest_of(*parts: bytes | str) -> bytes:
    """One hash of all parts, each with its length."""
    state = sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "big"))
        state.update(data)
    return state.digest()


class Remembered(Generic[V]):
    """Of one function."""

    def __init__(self, bytes_max: int) -> None:
        self._half = bytes_max // 2
        self._young: dict[bytes, tuple[V, int]] = {}
        self._old: dict[bytes, tuple[V, int]] = {}
        self._weight = 0
        """of the younger"""

    @property
    def bytes_held(self) -> int:
        """What all that is held weighs."""
        return sum(weight for held in (self._young, self._old) for _, weight in list(held.values()))

    def ask(self, question: bytes, answer: Callable[[], V], weigh: Callable[[V], int]) -> V:
        """The answer to a question (`digest_of`), made where it is not remembered; `weigh`: its bytes. One that raises is not
        remembered."""
        held = self._young.get(question)
        if held is None:
            held = self._old.get(question)
            if held is None:
                made = answer()
                held = made, ENTRY_BYTES + weigh(made)
            self._keep(question, held)
        return held[0]

    def _keep(self, question: bytes, held: tuple[V, int]) -> None:
        if self._weight >= self._half:
            self._old, self._young, self._weight = self._young, {}, 0
        self._young[question] = held
        self._weight += held[1]
