"""Read a stream from its beginning, in batches, and say what is missing instead of passing over it.

python examples/sdk/subscribe.py [REGION [COUNT]]
"""

import asyncio
import json
import sys
from collections import Counter

import felix

STREAM = "acme/plant/readings"


def missing(gap: felix.Gap) -> None:
    """Records that retention removed before they were read."""
    print(f"missing: {gap}")


async def main(region_name: str, count: int) -> None:
    readings: Counter[str] = Counter()
    async with felix.connect(region_name) as region:
        subscription = region.stream(STREAM).subscribe("earliest", on_gap=missing)
        async with subscription:
            async for batch in subscription.batches():
                for record in batch.records():  # payloads are views into the batch
                    readings[json.loads(bytes(record.payload))["sensor"]] += 1
                if readings.total() >= count:
                    break
        # Kept somewhere, these resume the subscription in another process.
        print("next offsets:", dict(sorted(subscription.positions.items())))
    print("readings:", dict(sorted(readings.items())))


if __name__ == "__main__":
    given = sys.argv[1:] + ["us-east", "1000"][len(sys.argv) - 1 :]
    asyncio.run(main(given[0], int(given[1])))
