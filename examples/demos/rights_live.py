"""Rights change while sessions stand: taken away, a subscription ends at once; given back, it goes on where it stood.

python examples/demos/rights_live.py [RECORDS]
"""

import asyncio
import sys

from own_region import OwnRegion, Summary, say

import felix

STREAM = "acme/ops/departures"
READER = "dashboard"
WRITER = "scheduler"
REFUSED = "NOT_FOUND_OR_FORBIDDEN"  # the same answer as for a stream that does not exist


async def read(subscription: felix.Subscription, count: int, found: list[int]) -> felix.FelixError | None:
    """Until `found` has `count` records, or the subscription is refused."""
    try:
        async for record in subscription:
            found.append(int(record.payload))
            if len(found) >= count:
                break
    except felix.RequestError as error:
        return error
    return None


async def refusal(stream: felix.Stream) -> str:
    """With which code a publish is refused; empty where it is not."""
    try:
        await stream.publish(b"-1")
    except felix.RequestError as error:
        return error.code.name
    return ""


async def run(own: OwnRegion, records: int) -> int:
    command = asyncio.to_thread
    summary = Summary("Rights, changed live")
    await command(own.cli, "identity", "issue", READER, "--allow", "subscribe acme/ops/*")
    await command(own.cli, "identity", "issue", WRITER, "--allow", "publish acme/ops/*")
    await command(own.cli, "stream", "create", STREAM)
    async with own.connect(WRITER) as writer, own.connect(READER) as reader:
        out, found = writer.stream(STREAM), []
        subscription = reader.stream(STREAM).subscribe("earliest", on_gap="raise")
        say(f"{READER} reads what {WRITER} publishes")
        await out.publish_many([b"%d" % n for n in range(records)])
        await asyncio.wait_for(read(subscription, records, found), 60)
        summary.must("records read with the right to", len(found), records)

        summary.must(f"{READER} publishing is answered", await refusal(reader.stream(STREAM)), REFUSED)

        say("felix identity forbid " + READER)
        waiting = asyncio.ensure_future(read(subscription, 2 * records, found))
        await asyncio.sleep(0)
        await command(own.cli, "identity", "forbid", READER)
        error = await asyncio.wait_for(waiting, 60)
        await out.publish_many([b"%d" % n for n in range(records, 2 * records)])
        summary.must("the standing subscription ended with", error.code.name if error else "", REFUSED)
        summary.must("records read since", len(found), records)
        again = reader.stream(STREAM).subscribe("earliest")
        error = await asyncio.wait_for(read(again, 1, []), 60)
        summary.must("a new subscription is answered", error.code.name if error else "", REFUSED)

        say(f"felix identity allow {READER} 'subscribe acme/ops/*'")
        await command(own.cli, "identity", "allow", READER, "subscribe acme/ops/*")
        resumed = reader.stream(STREAM).subscribe(offsets=subscription.positions, on_gap="raise")
        await asyncio.wait_for(read(resumed, 2 * records, found), 60)
        await resumed.close()
        summary.must("records read in the end, each once, in order", found == list(range(2 * records)), True)
        summary.must("sessions that were lost", reader.reconnects, 0)

        say("felix identity allow " + WRITER + " 'publish acme/hr/*'")
        await command(own.cli, "identity", "allow", WRITER, "publish acme/hr/*")
        summary.must(f"{WRITER}, on its open publisher, is answered", await refusal(out), REFUSED)
    async with own.connect() as operator:
        end = (await operator.describe_stream(STREAM)).state[0].high_watermark
    summary.must("records in the stream", end, 2 * records)
    return summary.end()


def main(records: int = 1_000) -> int:
    with OwnRegion() as own:
        return asyncio.run(run(own, records))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
