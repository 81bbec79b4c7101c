"""Publish readings of a few sensors into a stream, each sensor in order.

python examples/sdk/publish.py [REGION [COUNT]]
"""

import asyncio
import json
import sys

import felix

STREAM = "acme/plant/readings"


async def main(region_name: str, count: int) -> None:
    async with felix.connect(region_name) as region:
        try:
            await region.create_stream(STREAM, shards=2)
        except felix.RequestError as error:
            if error.code is not felix.Code.ALREADY_EXISTS:
                raise
        async with region.stream(STREAM).publisher(linger_ms=5) as publisher:
            for n in range(count):
                sensor = f"s{n % 7}"
                # Records with one key go to one shard, in order; `send` waits only while the buffer is full.
                await publisher.send(json.dumps({"sensor": sensor, "value": n}).encode(), key=sensor.encode())
            await publisher.flush()  # all are synced to the region's disk, or this raises
        print(f"{count} readings published to {STREAM}")


if __name__ == "__main__":
    given = sys.argv[1:] + ["us-east", "1000"][len(sys.argv) - 1 :]
    asyncio.run(main(given[0], int(given[1])))
