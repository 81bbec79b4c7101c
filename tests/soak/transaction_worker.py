"""A process that makes transactions and is killed: `transaction_worker.py HOME JOURNAL`.

It writes the name of each transaction before it begins it, and again with how it ended.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from soak.harness import Journal
from soak.transactions import PACE_S, transfer

import felix


async def main(home: Path, journal: Journal) -> None:
    run = os.urandom(4).hex()
    async with felix.connect(profile=felix.load_profile("us-east", home=home)) as region:
        at = 0
        while True:
            at += 1
            name = f"{run}-{at}"
            journal.write(f"begun {name}")
            journal.write(f"{await transfer(region, name.encode(), wanted=True)} {name}")
            await asyncio.sleep(PACE_S)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Journal(sys.argv[2])))
