"""What is done again and again while a process runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable


async def every(
    period_s: float, turn: Callable[[], Awaitable[object]], failure: str, log: logging.Logger
) -> None:
    """Wait `period_s`, take a turn, for ever; turns do not overlap. One that fails is logged as `failure` with its cause, and the
    next one comes all the same: a mistake of ours must not end what nothing begins again."""
    while True:
        await asyncio.sleep(period_s)
        try:
            await turn()
        except Exception:
            log.exception("%s", failure)
