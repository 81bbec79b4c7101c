"""A process that counts in a cache and is killed: `cache_worker.py HOME JOURNAL CACHE`.

It writes every acknowledged number into its journal, with the run that was told it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

from soak.caches import COUNTED, PACE_S
from soak.harness import Journal

import felix


async def main(home: Path, journal: Journal, cache: str) -> None:
    run = os.urandom(4).hex()
    async with felix.connect(profile=felix.load_profile("us-east", home=home)) as region:
        counters = region.cache(cache)
        while True:
            # Where nobody knows whether it counted, a number is skipped; the books allow for it.
            with suppress(felix.UnavailableError):
                journal.write(f"{run} {await counters.increment(COUNTED)}")
            await asyncio.sleep(PACE_S)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Journal(sys.argv[2]), sys.argv[3]))
