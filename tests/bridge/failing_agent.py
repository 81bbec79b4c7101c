"""An agent in a process of its own whose disk fails as it is told to (failing_disk): `failing_agent.py bridge.yaml`; it ends with its standard input."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from failing_disk import TOLD_BY, fail_as_told

import audit.trail_reopening
import bridge.egress_log
import felix.reopening
from bridge.agent import Agent
from bridge.config import load_config

AGAIN_MS = 300
"""For a test that has little time."""


async def main(path: Path) -> None:
    agent = await Agent.start(load_config(path), path.parent)
    try:
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await agent.stop()


fail_as_told(Path(os.environ[TOLD_BY]))
felix.reopening.REOPEN_MS_MIN = AGAIN_MS  # type: ignore[misc]
audit.trail_reopening.SOUND_ALONE_MS = 0  # type: ignore[misc]
bridge.egress_log.LOOK_S = 0.1  # type: ignore[misc,attr-defined]
logging.basicConfig(level=logging.INFO)
asyncio.run(main(Path(sys.argv[1])))
