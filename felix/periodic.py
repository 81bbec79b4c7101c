"""Periodic work while a process runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable


async def every(
    period_s: float, turn: Callable[[], Awaitable[object]], failure: str, log: logging.Logger
) -> None:
    """Wait `period_s`, then run once, for ever; runs do not overlap. A run that fails is logged as `failure` with its cause, and
    the next one follows: a bug must not end periodic work that nothing would restart.
    """
    while True:
        await asyncio.sleep(period_s)
        try:
            await turn()
        except Exception:
            log.exception("%s", failure)
