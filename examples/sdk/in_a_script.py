"""The same without asyncio, as in a notebook: publish one reading, read it back, ask what the stream is.

python examples/sdk/in_a_script.py [REGION]
"""

import sys

import felix
import felix.sync

STREAM = "acme/plant/readings"


def main(region_name: str) -> None:
    with felix.sync.connect(region_name) as region:
        stream = region.stream(STREAM)
        with stream.subscribe("latest") as subscription:
            offset = stream.publish(b'{"sensor": "s0", "value": -1}', key=b"s0")
            batch = subscription.next_batch(timeout_s=10)
            for record in batch.records():
                print(f"offset {record.offset}: {bytes(record.payload).decode()}")
                assert record.offset == offset
        state = region.describe_stream(STREAM)
        print(state.stream, [shard.high_watermark for shard in state.state])


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["us-east"]))
