"""`felix region drain`, `undrain`, `rebalance`, `retire`, `recover-shard` and `scale`: where the copies of a region of several brokers are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

import felix
from cli.free_address import free_address
from cli.output import counted, note, out, print_json, table
from cli.process import read_state
from cli.setting import (
    IdentityOption,
    JsonOption,
    RegionArgument,
    RegionOption,
    choose_region,
    connect,
    folder_of,
    one_of,
    run,
)
from felix.errors import Code, RequestError, UnavailableError
from felix.messages import BrokerState, RegionState, ShardMoves
from policy.quantity import Duration

LOOK_S: Final = 0.5
"""How often the region is asked how far it is."""
LOOKS: Final = 5
"""So many say that a broker is drained no more, or is none any more, or that a rebalancing was ended, before it is believed: another broker may be asked, which hears of it later."""


def copies_text(count: int) -> str:
    """As in: 3 copies."""
    return f"{count:,} {'copy' if count == 1 else 'copies'}"


Broker = Annotated[str, typer.Argument(help="A broker's id, as felix region status shows it.")]
Wait = Annotated[
    str, typer.Option(help="How long to wait until nothing moves any more, as in 10m; 0s: do not wait.")
]


def drain(
    broker: Broker,
    name: RegionArgument = "",
    wait: Wait = "10m",
    partly: Annotated[
        bool,
        typer.Option(
            "--partly", help="Also where too few other brokers may have some of its copies: those stay on it."
        ),
    ] = False,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Move all copies off a broker, and place nothing more there.

    Where copies have nowhere to go, because too few other brokers are there, it begins nothing and says which, and what to do first. What cannot be moved
    stays on it: streams of one copy that are fed by another region. Their number is told, and the command ends with 4. Ephemeral streams stay while the broker runs, and begin anew on another one once it has stopped.
    """
    region = one_of(name, region)
    state = run(_drain(region, identity, broker, int(Duration.parse(wait)), partly=partly))
    if json:
        print_json(state)
    else:
        left = f"{copies_text(state.copies)} left on it" if state.copies else "no copies"
        out.print(f"{broker} is drained: {left}")
    if state.alone:
        raise UnavailableError(
            f"{counted(state.alone, 'stream')} cannot be moved and stay on {broker}: they are not served while it is down.",
            hint="These are streams of one copy that are fed by another region; felix stream describe shows where each is.",
        )
    if state.bound and partly:
        raise UnavailableError(
            f"{copies_text(state.bound)} stay{'s' if state.bound == 1 else ''} on {broker}: too few other brokers may have them.",
            hint=f"felix region drain {broker}, without --partly, says which, and what to do.",
        )


async def _drain(
    region: str,
    identity: str,
    broker: str,
    wait_ms: int,
    *,
    partly: bool = False,
    beside: Sequence[str] = (),
) -> BrokerState:
    """`beside`: brokers that are drained after this one."""
    async with connect(region, identity) as client:
        await client.drain_broker(broker, partly=partly, beside=beside)
        found: BrokerState

        async def copies() -> int:
            nonlocal found
            (found,) = await _still_drained(client, [broker])
            return found.copies - (found.bound if partly else 0)

        if not wait_ms:
            await copies()
            return found
        await _until_none_is_left(
            wait_ms,
            copies,
            lambda left: f"{copies_text(left)} on {broker}",
            lambda left: UnavailableError(
                f"{broker} is being drained, and has still {copies_text(left)} after {Duration(wait_ms)}.",
                code=Code.TIMEOUT,
                hint="It goes on by itself. A copy stays where too few other brokers are up for the stream's min-in-sync; "
                "felix region status shows what is wrong, felix region undrain ends it.",
            ),
        )
        return found


async def _still_drained(client: felix.RegionClient, names: Sequence[str]) -> list[BrokerState]:
    """Brokers that this command drained. Raises RequestError where somebody has retired one meanwhile (NOT_FOUND), or let it have copies again (CONFLICT)."""
    for _ in range(LOOKS):
        state = await client.describe()
        found = [each for each in state.brokers if each.broker in names]
        gone = sorted({*names} - {each.broker for each in found})
        ended = [each.broker for each in found if not each.is_drained]
        if not gone and not ended:
            return found
        await asyncio.sleep(LOOK_S)
    if gone:
        raise RequestError(
            f"{', '.join(gone)} is no broker of {state.region} any more: it was drained, and somebody retired it meanwhile, as `felix region scale` does.",
            code=Code.NOT_FOUND,
            hint="It has no copies. felix region status shows the region's brokers.",
        )
    raise RequestError(
        f"{', '.join(ended)} may have copies again: somebody ended the drain meanwhile, as with `felix region undrain`.",
        code=Code.CONFLICT,
        hint="felix region status shows which brokers are drained; repeat this command if it is still wanted.",
    )


def undrain(
    broker: Broker, name: RegionArgument = "", region: RegionOption = "", identity: IdentityOption = ""
) -> None:
    """Let a broker have copies again. It gets those that are missing, and new streams; `rebalance` gives it its share."""
    run(_undrain(one_of(name, region), identity, broker))
    out.print(f"{broker} may have copies again")


async def _undrain(region: str, identity: str, broker: str) -> None:
    async with connect(region, identity) as client:
        await client.drain_broker(broker, drain=False)


def rebalance(
    name: RegionArgument = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be moved, at most one broker's share.")
    ] = False,
    stop: Annotated[
        bool,
        typer.Option(
            "--stop",
            help="End a rebalancing: what has not begun to move for it stays, and what moves arrives. Drains go on.",
        ),
    ] = False,
    wait: Wait = "10m",
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Move copies until each broker has its share. Streams that are ephemeral or fed by another region stay."""
    wait_ms = int(Duration.parse(wait))
    if stop:
        if dry_run:
            raise RequestError("--stop ends a rebalancing, and --dry-run begins none: say one of them.")
        ended = run(_stop_rebalancing(one_of(name, region), identity))
        if json:
            print_json(ended)
        else:
            out.print(_ended_text(ended))
        return
    begun, moves = run(_rebalance(one_of(name, region), identity, dry_run, wait_ms))
    if json:
        print_json(begun, moved=moves.moved, unled=moves.unled)
    elif not begun.total:
        out.print("Each broker has its share: nothing moves")
    elif dry_run:
        table(
            f"{counted(begun.total, 'shard')} would move",
            ["stream", "shard#", "copies now", "then"],
            [[each.stream, each.shard, ", ".join(each.now), ", ".join(each.then)] for each in begun.moves],
        )
    elif not wait_ms:
        out.print(f"{counted(begun.total, 'shard')} will move")
    else:
        out.print(f"{counted(moves.moved, 'shard')} moved")
    if moves.unled and not dry_run:
        stay = "shard stays where it is" if moves.unled == 1 else "shards stay where they are"
        raise UnavailableError(
            f"{moves.unled:,} {stay}, as nobody can lead {'it' if moves.unled == 1 else 'them'}.",
            hint="felix region status says why and how to go on; then repeat felix region rebalance.",
        )


def _ended_text(ended: ShardMoves) -> str:
    if not ended.is_asked:
        return "No rebalancing is under way" + (
            f"; {counted(ended.under_way, 'shard')} still on the way arrive{'s' if ended.under_way == 1 else ''}"
            if ended.under_way
            else ""
        )
    arrives = (
        f"{counted(ended.under_way, 'shard')} on the way arrive{'s' if ended.under_way == 1 else ''}"
        if ended.under_way
        else "nothing is on the way"
    )
    return f"The rebalancing is ended: {arrives}, and nothing more begins to move for it. Drains go on"


async def _stop_rebalancing(region: str, identity: str) -> ShardMoves:
    async with connect(region, identity) as client:
        return await client.stop_rebalancing()


async def _rebalance(
    region: str, identity: str, dry_run: bool, wait_ms: int
) -> tuple[ShardMoves, ShardMoves]:
    """What was to move, and what became of it."""
    async with connect(region, identity) as client:
        begun = moves = await client.rebalance(dry_run=dry_run)
        if dry_run or not moves.total or not wait_ms:
            return begun, moves

        async def to_move() -> int:
            nonlocal moves
            for _ in range(LOOKS):
                moves = await client.rebalance(dry_run=True, since=begun.revision)
                if moves.is_asked or not moves.total:
                    return max(moves.under_way, moves.total)
                await asyncio.sleep(LOOK_S)
            raise RequestError(
                f"The rebalancing was ended before all was moved, as by `felix region rebalance --stop`: {counted(moves.moved, 'shard')} moved, "
                f"{moves.under_way:,} on the way, {moves.total:,} that would have moved stay.",
                code=Code.CONFLICT,
                hint="Repeat this command if it is still wanted: it goes on.",
            )

        await _until_none_is_left(
            wait_ms,
            to_move,
            lambda left: f"{counted(left, 'shard')} to be moved",
            lambda left: UnavailableError(
                f"After {Duration(wait_ms)} {counted(left, 'shard')} are still to be moved.",
                code=Code.TIMEOUT,
                hint="It goes on by itself; felix region rebalance --dry-run shows what is left.",
            ),
        )
        return begun, moves


async def _until_none_is_left(
    wait_ms: int,
    look: Callable[[], Awaitable[int]],
    said: Callable[[int], str],
    late: Callable[[int], UnavailableError],
) -> None:
    """Look until it says none, and note each other number once. Raises what `late` makes of the last one after `wait_ms`."""
    told, left = 0, await look()
    try:
        async with asyncio.timeout(wait_ms / 1_000):
            while left:
                if left != told:
                    told = left
                    note(said(left))
                await asyncio.sleep(LOOK_S)
                left = await look()
    except TimeoutError:
        raise late(left) from None


def _of(state: RegionState, broker: str) -> BrokerState:
    """Raises RequestError(NOT_FOUND)."""
    for each in state.brokers:
        if each.broker == broker:
            return each
    raise RequestError(f"{state.region} has no broker {broker}.", code=Code.NOT_FOUND)


def retire(
    broker: Broker, name: RegionArgument = "", region: RegionOption = "", identity: IdentityOption = ""
) -> None:
    """Say that a broker is gone for good, once it is drained and stopped: nothing waits for it any more."""
    run(_retire(one_of(name, region), identity, broker))
    out.print(f"{broker} is retired; take it out of cluster.brokers in region.yaml")


async def _retire(region: str, identity: str, broker: str) -> None:
    async with connect(region, identity) as client:
        await client.retire_broker(broker)


def recover_shard(
    stream: Annotated[str, typer.Argument(help="tenant/namespace/name, as in acme/ops/departures.")],
    shard: Annotated[int, typer.Argument(help="The shard's number, from 0 on.")],
    broker: Annotated[str, typer.Option("--from", help="The broker whose copy is the shard from now on.")],
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss", help="Needed: what that copy lacks is lost, though it was acknowledged."
        ),
    ] = False,
    lost: Annotated[
        list[str] | None,
        typer.Option(help="A broker whose copy is given up; say it for each that may have more records."),
    ] = None,
    powered_off: Annotated[
        bool,
        typer.Option(
            "--powered-off",
            help="Those brokers surely run no more; else it takes 15 minutes until none can commit.",
        ),
    ] = False,
    region: RegionOption = "",
    identity: IdentityOption = "",
) -> None:
    """Have a shard led that nobody can lead by rule, from a copy that may lack what was acknowledged. The last resort."""
    if not accept_loss:
        raise RequestError(
            f"Whatever {broker} lacks of shard {shard} of {stream} would be lost, though it was acknowledged.",
            hint="If the brokers that have it will not come back, say --accept-loss.",
        )
    out.print(run(_recover(region, identity, stream, shard, broker, lost or [], powered_off)))


async def _recover(
    region: str, identity: str, stream: str, shard: int, broker: str, lost: list[str], powered_off: bool
) -> str:
    async with connect(region, identity) as client:
        return await client.recover_shard(stream, shard, broker, lost=lost, powered_off=powered_off)


def scale(
    count: Annotated[
        int, typer.Argument(help="How many brokers the region is to have on this machine.", min=1)
    ],
    name: RegionArgument = "",
    wait: Wait = "10m",
    region: RegionOption = "",
    identity: IdentityOption = "",
) -> None:
    """Give a region of several brokers of this machine more of them, or fewer: those that go are drained first.

    region.yaml says it from then on; `felix region up`, where it runs, starts and stops them.
    """
    from cli.several import are_all_here, require_unchanged, scaled, was_registered

    region = name = choose_region(one_of(name, region))
    folder, config = folder_of(name)
    if config.cluster is None:
        raise RequestError(
            f"{name} has one broker.",
            hint=f"Not served yet, it begins with several: felix region up {name} --brokers {count}. Else turn it into one of several first: felix region to-cluster {name}.",
        )
    if not are_all_here(folder, config):
        raise RequestError(
            f"The brokers of {name} may be on several machines, which this command does not reach.",
            hint="Change cluster.brokers in each region.yaml; drain and retire those that go (docs/clusters.md).",
        )
    before = [str(each.id) for each in config.cluster.brokers]
    going = before[count:]
    wait_ms = int(Duration.parse(wait))
    is_served = read_state(folder.broker_pid) is not None
    finished = run(_finish(region, identity, before, wait_ms)) if is_served else []
    if finished:
        note(f"{', '.join(finished)}: retired, as an earlier `felix region scale` did not come so far")
    if not going:
        after = scaled(folder, config, count, free_address)
        assert after.cluster is not None
        # Also those that a command which was ended wrote there, and that come only now.
        new = [
            broker
            for each in after.cluster.brokers
            if (broker := str(each.id)) not in before or not was_registered(folder.root / config.data, broker)
        ]
        if new and is_served:
            run(_come(region, identity, new, wait_ms, folder.config))
        away, drained = run(_standing(region, identity, before)) if is_served else ([], [])
        if away:
            note(
                f"{', '.join(away)} {'is' if len(away) == 1 else 'are'} not alive; felix region status {region} says why"
            )
        if drained:
            note(
                f"{', '.join(drained)} {'is' if len(drained) == 1 else 'are'} drained and may have no copies; felix region undrain {drained[0]} changes that"
            )
        out.print(
            f"{name} has {counted(count, 'broker')}; `felix region rebalance` gives new ones their share"
        )
        return
    if config.cluster.replicas > count:
        raise RequestError(
            f"{folder.config} gives new streams {copies_text(config.cluster.replicas)}, each on a broker of its own.",
            code=Code.CONFLICT,
            hint=f"Change replicas: in cluster: there to {count} or less, and start the brokers again.",
        )
    try:
        drained = run(_leave(region, identity, going, wait_ms, folder.root / config.data))
    except RequestError:
        # Another one may have retired them meanwhile, and whatever it is refused with follows from that.
        require_unchanged(folder, config)
        raise
    scaled(folder, config, count, free_address)
    run(_gone(region, identity, going, wait_ms))
    said = []
    for names, what in (
        (drained, "drained, stopped and retired"),
        (
            [each for each in going if each not in drained],
            "taken out of region.yaml, and was none of the region's",
        ),
    ):
        if names:
            said.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {what}")
    out.print(f"{name} has {counted(count, 'broker')}: {'; '.join(said)}")


async def _come(region: str, identity: str, names: list[str], wait_ms: int, written: Path) -> None:
    """`written`: region.yaml. Raises RequestError(CONFLICT) where it names one of them no more, which then never starts."""
    from region.config import load_config

    def lacking(state: RegionState) -> int:
        away = [name for name in names if not _is_alive(state, name)]
        cluster = load_config(written).cluster if away else None
        named = [str(each.id) for each in cluster.brokers] if cluster is not None else []
        if gone := [name for name in away if name not in named]:
            raise RequestError(
                f"{', '.join(gone)} will not start: {written} was changed meanwhile, as by another `felix region scale`.",
                code=Code.CONFLICT,
                hint="Look at cluster.brokers there, and repeat the command if it is still wanted.",
            )
        return len(away)

    async with connect(region, identity) as client:
        await _until(client, wait_ms, lacking, "start")


async def _leave(region: str, identity: str, names: list[str], wait_ms: int, data: Path) -> list[str]:
    """Drain those that the region knows, and return them. Raises RequestError before anything is moved where what one has cannot be."""
    from cli.several import was_retired

    async with connect(region, identity) as client:
        state = await client.describe()
        known = [name for name in names if any(each.broker == name for each in state.brokers)]
        # One that never came up, or that was retired and is in region.yaml again, has nothing in this region.
        if strange := [name for name in names if name not in known and not was_retired(data, name)]:
            raise RequestError(
                f"{region} does not know {', '.join(strange)}, whose data folder says that it was a broker of the region, and nobody knows that it was retired.",
                code=Code.CONFLICT,
                hint=f"Where etcd was put back from a backup: felix region reconcile {region}. Else move {data / strange[0]} elsewhere, and keep it.",
            )
        for name in known:
            found = _of(state, name)
            if found.alone:
                raise RequestError(
                    f"{name} has {counted(found.alone, 'stream')} that cannot be moved, so it stays.",
                    code=Code.CONFLICT,
                    hint="These are streams of one copy that are fed by another region: delete those that are "
                    "not needed any more, or copy their records into another stream.",
                )
        drained = [each.broker for each in state.brokers if each.is_drained and each.broker not in names]
        if drained:
            left = sum(
                bool(each.address) and not each.is_drained and each.broker not in names
                for each in state.brokers
            )
            note(
                f"{', '.join(drained)} {'is' if len(drained) == 1 else 'are'} drained: {counted(left, 'broker')} "
                f"may have copies from then on; felix region undrain {drained[0]} changes that"
            )
    for number, name in enumerate(known):
        # Refused before the first is drained where not all can be.
        await _drain(region, identity, name, wait_ms, beside=known[number + 1 :])
    async with connect(region, identity) as client:
        # Where it was not to wait, or somebody let the first have copies again while the last was drained.
        for each in await _still_drained(client, known):
            if each.copies:
                raise UnavailableError(
                    f"{each.broker} is being drained, and has still {copies_text(each.copies)}: it is not stopped.",
                    code=Code.TIMEOUT,
                    hint="Repeat this command, with a --wait that is long enough: it goes on.",
                )
    return known


async def _finish(region: str, identity: str, named: Sequence[str], wait_ms: int) -> list[str]:
    """Retire what a command that was ended drained and took out of region.yaml; the names."""
    async with connect(region, identity) as client:
        state = await client.describe()
    left = [
        each.broker
        for each in state.brokers
        if each.broker not in named and each.is_drained and not each.copies
    ]
    if left:
        await _gone(region, identity, left, wait_ms)
    return left


async def _gone(region: str, identity: str, names: list[str], wait_ms: int) -> None:
    async with connect(region, identity) as client:
        await _until(client, wait_ms, lambda state: sum(_is_alive(state, name) for name in names), "stop")
        known = {each.broker for each in (await client.describe()).brokers}
        for name in (each for each in names if each in known):
            try:
                await client.retire_broker(name)
            except RequestError as error:
                # Another `felix region scale` was quicker, and the region is as this one was to leave it.
                if error.code is not Code.NOT_FOUND:
                    raise


async def _standing(region: str, identity: str, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those that are not alive, and those that are drained."""
    async with connect(region, identity) as client:
        state = await client.describe()
    away = [name for name in names if not _is_alive(state, name)]
    return away, [each.broker for each in state.brokers if each.broker in names and each.is_drained]


def _is_alive(state: RegionState, name: str) -> bool:
    return any(each.broker == name and each.address for each in state.brokers)


async def _until(
    client: felix.RegionClient, wait_ms: int, lacking: Callable[[RegionState], int], what: str
) -> None:
    """Wait until of no broker `what` is lacking."""

    async def look() -> int:
        return lacking(await client.describe())

    await _until_none_is_left(
        wait_ms,
        look,
        lambda left: f"{counted(left, 'broker')} to {what}",
        lambda left: UnavailableError(
            f"Not every broker did {what} within {Duration(wait_ms)}.",
            code=Code.TIMEOUT,
            hint="Does `felix region up` run? It follows region.yaml; felix region status shows its brokers.",
        ),
    )
