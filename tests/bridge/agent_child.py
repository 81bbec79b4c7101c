"""An agent in a process of its own, for tests that kill it: `agent_child.py bridge.yaml`; it ends with its standard input."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from bridge.agent import Agent
from bridge.config import load_config


async def main(path: Path) -> None:
    agent = await Agent.start(load_config(path), path.parent)
    try:
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await agent.stop()


logging.basicConfig(level=logging.INFO)
asyncio.run(main(Path(sys.argv[1])))
