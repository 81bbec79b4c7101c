"""How a play of real brokers is asked for on the command line: `python -m cluster.play_… FOLDER --rounds N --seed S`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path


def play_as_asked(play: Callable[[Path, int, int], Awaitable[None]], about: str | None, rounds: int) -> int:
    """Play what the command line asks for in its folder: `play(folder, rounds, seed)`. `rounds`: where it does not say how many. The exit code."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)

    async def played() -> None:
        await play(asked.folder, asked.rounds, asked.seed)

    asyncio.run(played())
    return 0
