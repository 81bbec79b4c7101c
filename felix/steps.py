"""Work that is done step by step, so that whoever runs it can give others their turn in between. Pure.

What is done for a batch that another party wrote may take seconds, and an event loop has others waiting: it is a generator, which yields between two steps and
returns its result. Invariant: how it is stepped through changes nothing about the result.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that ends with a result; between two steps others may have their turn."""


def finished(steps: Steps[T]) -> T:
    """What they end with, all at once. Raises what they do."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            found: T = ended.value
            return found
