"""What a run is to do: operations of clients and faults of machines, drawn before it begins, so that some can be left out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

Part = TypeVar("Part")


class Step(NamedTuple):
    """After `after_s`, counted from the step before of the same `who`, `who` does `what`, to `where`, for `lasts_s`."""

    who: str
    what: str
    after_s: float
    where: str = ""
    lasts_s: float = 0.0
    number: int = 0

    def __str__(self) -> str:
        parts = [self.who, self.what, self.where, f"{self.number}" if self.number else ""]
        lasts = f" for {self.lasts_s:.3f} s" if self.lasts_s else ""
        return f"after {self.after_s:.3f} s: {' '.join(part for part in parts if part)}{lasts}"


Script = tuple[Step, ...]


def shrink(
    script: tuple[Part, ...], fails: Callable[[tuple[Part, ...]], bool], tries_max: int
) -> tuple[Part, ...]:
    """A shorter script that still fails, after at most so many tries: first large parts are left out, then smaller ones, then
    single steps."""
    size = max(1, len(script) // 2)
    tries = 0
    while tries < tries_max:
        at, shorter = 0, False
        while at < len(script) and tries < tries_max:
            tries += 1
            left = script[:at] + script[at + size :]
            if fails(left):
                script, shorter = left, True
            else:
                at += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2)
    return script
