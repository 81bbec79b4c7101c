"""Two tenants on one broker: each sees its own streams alone, and cannot even learn which names the other uses.

python examples/demos/two_tenants.py [RECORDS]
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable

from own_region import OwnRegion, Summary, say

import felix

TENANTS = ("acme", "globex")
STREAMS = ("payments/orders", "web/clicks")


def attempts(region: felix.RegionClient, name: str) -> dict[str, Callable[[], Awaitable[object]]]:
    """Everything that a client may try on a stream."""
    stream = region.stream(name)

    async def subscribe() -> None:
        async with stream.subscribe("earliest") as subscription:
            await anext(aiter(subscription))

    return {
        "publish": lambda: stream.publish(b"from a stranger"),
        "subscribe": subscribe,
        "describe": stream.describe,
        "delete": stream.delete,
    }


async def answers(region: felix.RegionClient, name: str) -> dict[str, str]:
    """How each attempt is answered: the code and the sentence, without the stream's own name in it."""
    found = {}
    for what, attempt in attempts(region, name).items():
        try:
            await asyncio.wait_for(attempt(), 60)
            found[what] = "allowed"
        except felix.RequestError as error:
            found[what] = f"{error.code.name}: {error.sentence.replace(name, '…')}"
    return found


async def run(own: OwnRegion, records: int) -> int:
    summary = Summary("Two tenants that cannot see each other")
    for tenant in TENANTS:
        rights = f"publish,subscribe,admin {tenant}/*/*"
        await asyncio.to_thread(own.cli, "identity", "issue", f"{tenant}-app", "--allow", rights)
    async with own.connect("acme-app") as acme, own.connect("globex-app") as globex:
        regions = dict(zip(TENANTS, (acme, globex), strict=True))
        say("both use the same names for their streams, at the same time")

        async def work(tenant: str) -> None:
            for name in STREAMS:
                stream = regions[tenant].stream(f"{tenant}/{name}")
                await stream.create()
                await stream.publish_many([f"{tenant} {name} {n}".encode() for n in range(records)])

        await asyncio.gather(*map(work, TENANTS))
        for tenant, region in regions.items():
            seen = {state.stream async for state in region.list_streams()}
            summary.must(
                f"{tenant} sees its own streams alone", seen == {f"{tenant}/{n}" for n in STREAMS}, True
            )
            strange = 0
            for name in STREAMS:
                async with region.stream(f"{tenant}/{name}").subscribe("earliest", on_gap="raise") as mine:
                    read = []
                    async for record in mine:
                        read.append(bytes(record.payload))
                        if len(read) == records:
                            break
                strange += sum(not each.startswith(f"{tenant} {name} ".encode()) for each in read)
            summary.must(f"records of others among {tenant}'s", strange, 0)

        say("each tries everything on the other's streams, and on names that nobody has")
        allowed = told_apart = tried = 0
        for tenant, other in (TENANTS, TENANTS[::-1]):
            for name in STREAMS:
                real = await answers(regions[tenant], f"{other}/{name}")
                made_up = await answers(regions[tenant], f"{other}/{name}-that-is-not")
                tried += len(real)
                allowed += sum(answer == "allowed" for answer in real.values())
                told_apart += sum(real[what] != made_up[what] for what in real)
        summary.figure("attempts on the other's streams", tried)
        summary.must("of them allowed", allowed, 0)
        summary.must("of them told from a name that does not exist", told_apart, 0)
    async with own.connect() as operator:
        for tenant in TENANTS:
            for name in STREAMS:
                state = await operator.describe_stream(f"{tenant}/{name}")
                summary.must(f"records in {tenant}/{name}", state.state[0].high_watermark, records)
    return summary.end()


def main(records: int = 1_000) -> int:
    with OwnRegion() as own:
        return asyncio.run(run(own, records))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2])))
