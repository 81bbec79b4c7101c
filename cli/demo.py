"""`felix demo`: two regions, one bridge, one report, on real input; it ends with 0 only if every number reconciles. With several brokers to a region,
the leader of the stream in each region and the agent are killed while records cross.

Everything is real: two broker processes and an agent process, QUIC over loopback, files that are synced, a Spark
report. All state is under one folder, which is re-created at each run.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.progress import Progress, TaskID

from audit.checkpoint import claimed_size
from audit.leaf import Kind, decode_leaf
from audit.note import parse_note
from audit.tile import CHECKPOINT_PATH, COSIGNED_PATH, read_entries
from audit.tile_disk import Folder
from audit.verify import Report as Verification
from cli import bridge as bridge_command
from cli.agent import start as start_agent_of
from cli.audit import own_log, trusted, verify_one
from cli.exits import EXIT_UNRECONCILED
from cli.flights import FLIGHTS, departures, flights_file, rosters
from cli.grants import add_right, known_bundles, put_document
from cli.output import err, note, out, progress, styled, table, verdict
from cli.policy import load_policy
from cli.process import read_state, start_detached, stop
from cli.setting import connect, run
from felix.address import Address
from felix.errors import FelixError, RequestError
from felix.identity_file import load_identity
from felix.messages import ListStreams, PutDocument
from felix.names import SpiffeId
from felix.runtime.real import now_ms
from keys.bundle import decode_bundle
from keys.key_file import load_signing_key
from policy.access import Verb
from policy.approval import APPROVER, sign_approval
from policy.grant import open_export, sign_export, sign_import
from policy.residency import sign_policy
from policy.terms import Basis, GrantTerms
from policy.transform import KeyRule, build_spec
from region.bootstrap import OPERATOR, found_region, issue_identity, trust_region
from region.config import load_config
from region.folder import RegionFolder

SOURCE: Final = "us-east"
DESTINATION: Final = "eu-west"
MESH: Final = "acme"
GRANTED: Final = "acme/ops/departures"
COPIES: Final = 3
"""Of each stream, in both regions, where there are so many brokers."""
UNGRANTED: Final = "acme/ops/crew"
BRIDGE: Final = f"{SOURCE}-to-{DESTINATION}"
APPROVER_NAME: Final = "dpo"
SHARDS: Final = 2
BROKERS_MAX: Final = 9
"""Of each region: all of them are processes of this machine."""
CATCH_UP_IDLE_S: Final = 120.0
"""The demo gives up once nothing has crossed for so long."""
COSIGNED_S: Final = 60.0
"""Each region cosigns the other's logs every few seconds; where another broker has just gone on with a log, somewhat later. Behind this the
demo verifies what there is."""
STILL_S: Final = 1.0
"""How long all logs stand as they are before the demo goes by that: a leaf is in a checkpoint much sooner."""


@dataclass(slots=True)
class Figures:
    """The demo's counts, each with its source."""

    grant: str = ""
    published: int = 0
    """acknowledged by the source's broker"""
    published_seconds: float = 0.0
    ungranted: int = 0
    crossed: int = 0
    """INTENT entries of the egress log"""
    withheld: int = 0
    """WITHHELD entries of the egress log"""
    acknowledged: int = 0
    """ACK entries of the egress log, with receipts"""
    delivered: int = 0
    """read by a subscriber in the destination"""
    crossing_seconds: float = 0.0
    denied: int = 0
    """DENY leaves of the source's log"""
    leaks: int = 0
    """records in the destination with a tail number as it was in the source, or with a dropped field"""
    foreign_streams: int = 0
    """streams in the destination other than the granted one"""
    leaves: dict[str, int] = field(default_factory=dict)
    verified: dict[str, bool] = field(default_factory=dict)
    cosigned: dict[str, int] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)
    """what was killed on the way"""
    reported: int = -1
    """records in the report's transfer register"""
    page: str = ""


def demo(
    records: Annotated[str, typer.Option(help="How many flights; `all` for the whole year.")] = "all",
    state: Annotated[Path, typer.Option(help="Where everything is kept; made anew.")] = Path("demo-state"),
    report: Annotated[bool, typer.Option(help="Make the Spark report.")] = True,
    brokers: Annotated[
        int,
        typer.Option(
            help="Brokers of each region. With more than one, the stream's leader in each region and the agent are killed on the way.",
            min=1,
            max=BROKERS_MAX,
        ),
    ] = 1,
) -> None:
    """Two regions, one bridge, one report: published, crossed, withheld, denied, verified, reconciled."""
    limit = 0 if records == "all" else _count(records)
    flights_file()
    home = state.resolve()
    _clear(home)
    os.environ["FELIX_HOME"] = str(home)
    figures = Figures()
    began = time.monotonic()
    try:
        figures.grant = _set_up(home, brokers)
        with progress() as bar:
            run(_move(bar, figures, limit, brokers > 1))
        _attempt_refused(figures)
        _await_cosignatures(home)
    finally:
        _stop_all(home)
    verifications = _verify(home, figures)
    if report:
        _report(home, figures)
    problems = reconcile(figures, verifications, limit, with_report=report)
    _print(figures, home, time.monotonic() - began, problems)
    if problems:
        raise typer.Exit(EXIT_UNRECONCILED)


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= FLIGHTS:
        raise RequestError(f"{text!r} is no number of flights.", hint=f"Use 1 to {FLIGHTS}, or all.")
    return int(text)


def _clear(home: Path) -> None:
    """Remove an earlier run's state, its processes first. Refuses a folder that is not a demo's."""
    marker = home / ".felix-demo"
    if home.exists():
        if not marker.exists() and any(home.iterdir()):
            raise RequestError(
                f"{home} is not a demo's folder, and is not removed.", hint="Name another one with --state."
            )
        _stop_all(home)
        shutil.rmtree(home)
    home.mkdir(parents=True)
    marker.touch()


def _stop_all(home: Path) -> None:
    for pid_file in sorted(home.glob("*/bridges/*/agent.pid")) + sorted(home.glob("*/run/broker.pid")):
        try:
            stop(pid_file, str(pid_file.parent))
        except FelixError:
            continue  # it does not run


# -- two regions, a grant, an agent --------------------------------------------------------------------


def _set_up(home: Path, brokers: int) -> str:
    """Found, start, govern. Returns the grant's id."""
    several = ["--brokers", str(brokers)] if brokers > 1 else []
    for region, country, jurisdiction in ((SOURCE, "US", "US"), (DESTINATION, "IE", "EU")):
        folder = RegionFolder.of(region)
        found_region(
            folder,
            region=region,
            mesh=MESH,
            country=country,
            jurisdiction=jurisdiction,
            entity=f"Acme {'Inc.' if region == SOURCE else 'Ltd.'}",
            listen=Address("127.0.0.1", 0),
            health=Address("127.0.0.1", 0),
            now_ms=now_ms(),
        )
    source, destination = RegionFolder.of(SOURCE), RegionFolder.of(DESTINATION)
    issue_identity(source, load_config(source.config), "bridge", BRIDGE, now_ms())
    for folder in (source, destination):
        issue_identity(folder, load_config(folder.config), APPROVER, APPROVER_NAME, now_ms())
    trust_region(source, decode_bundle(destination.bundle.read_bytes()), now_ms())
    trust_region(destination, decode_bundle(source.bundle.read_bytes()), now_ms())
    for region in (SOURCE, DESTINATION):
        folder = RegionFolder.of(region)
        state = start_detached(
            ["--log-level", "info", "region", "up", region, *several],
            folder.broker_pid,
            folder.broker_log,
            f"The broker of {region}",
            f"felix region down {region}",
        )
        note(
            f"{region}: {brokers} brokers and their etcd under process {state['pid']}, the first one at {state['address']}"
            if several
            else f"{region}: broker process {state['pid']} at {state['address']}, metrics at http://{state['health']}/metrics"
        )
    grant = run(_govern(source, destination, min(brokers, COPIES)))
    start_agent_of(source, BRIDGE, DESTINATION)
    note(f"bridge {BRIDGE}: agent process runs, with an identity of its own")
    return grant


def _policy_file(region: str) -> Path:
    """The example policies: in the wheel beside this module, in a checkout under examples/."""
    name = "residency.yaml" if region == SOURCE else f"residency-{region}.yaml"
    packaged = Path(__file__).parent / "examples" / name
    return packaged if packaged.exists() else Path(__file__).parent.parent / "examples" / "regions" / name


async def _govern(source: RegionFolder, destination: RegionFolder, copies: int) -> str:
    policies = {}
    for region, folder in ((SOURCE, source), (DESTINATION, destination)):
        policy = policies[region] = load_policy(_policy_file(region))
        document = sign_policy(policy, load_signing_key(folder.policy_key).private_key)
        async with connect(region) as client:
            answer = await client.request(PutDocument("policy", document.encode_file()))
            note(f"{region}: {answer.note}")
            if region == SOURCE:
                for name in (GRANTED, UNGRANTED):
                    await client.create_stream(name, shards=SHARDS, replicas=copies)
            elif copies > 1:
                # Else the bridge has it made.
                await client.create_stream(GRANTED, shards=SHARDS, replicas=copies)
    now = now_ms()
    terms = GrantTerms(
        stream=GRANTED,
        from_region=SOURCE,
        to_region=DESTINATION,
        bridge=str(SpiffeId(SOURCE, MESH, "bridge", BRIDGE)),
        purpose="punctuality analytics",
        basis=Basis.SCC,
        mechanism="module 1",
        reference="SCC-2026-014",
        transfer_assessment="TIA-2026-009",
        categories=("flight operations",),
        exporter="Acme Inc.",
        importer="Acme Ltd.",
        owner="flight operations",
        drawn_up_by=str(SpiffeId(SOURCE, MESH, "operator", OPERATOR)),
        not_before=now,
        expires=now + 80 * 86_400_000,
        transform=build_spec(pseudonymize=["tailnum"], drop=["hour", "minute"], key=KeyRule.KEEP),
    )
    export = sign_export(terms, policies[SOURCE], load_signing_key(source.policy_key).private_key, now)
    trusted_keys = {region: bundle.policy_keys for region, bundle in known_bundles(destination).items()}
    accepted = sign_import(
        export,
        policies[DESTINATION],
        load_signing_key(destination.policy_key).private_key,
        trusted_keys,
        str(SpiffeId(DESTINATION, MESH, "operator", OPERATOR)),
        now,
    )
    note(f"{SOURCE}: {await put_document(SOURCE, 'export', export)}")
    await add_right(SOURCE, terms.bridge, f"{Verb.BRIDGE_READ} {GRANTED}")
    await put_document(DESTINATION, "export", export)
    note(f"{DESTINATION}: {await put_document(DESTINATION, 'import', accepted)}")
    for region, folder in ((SOURCE, source), (DESTINATION, destination)):
        approval = sign_approval(
            terms.hash(), load_identity(folder.identity(APPROVER_NAME)), now_ms(), "checked"
        )
        note(f"{region}: {await put_document(region, 'approval', approval)}")
    return open_export(export, trusted_keys).grant


# -- publish, cross, read ------------------------------------------------------------------------------

NOTHING_HAPPENS: Final[Mapping[int, Callable[[], Awaitable[None]]]] = {}


async def _kill_leader(region: str, figures: Figures) -> None:
    """SIGKILL to the broker that leads the granted stream; its parent starts it again."""
    folder = RegionFolder.of(region)
    broker = ""
    async with connect(region) as client, asyncio.timeout(CATCH_UP_IDLE_S):
        while not broker:
            # The destination's stream comes with the first record that crosses.
            await asyncio.sleep(0.1)
            for stream in (await client.request(ListStreams(GRANTED))).streams:
                broker = stream.state[0].leader
    state = read_state(folder.pid_of(broker))
    if state is None:
        raise RequestError(
            f"Broker {broker} of {region} does not run.", hint="See the region's log in the demo's folder."
        )
    os.kill(state["pid"], signal.SIGKILL)
    figures.killed.append(f"broker {broker} of {region}")
    note(f"killed: broker {broker} of {region}, which leads {GRANTED}")


async def _kill_agent(figures: Figures) -> None:
    """SIGKILL to the agent, which is then started again."""
    source = RegionFolder.of(SOURCE)
    state = read_state(source.bridge(BRIDGE) / "agent.pid")
    if state is None:
        raise RequestError(f"The agent {BRIDGE} does not run.", hint="See its log in the demo's folder.")
    os.kill(state["pid"], signal.SIGKILL)
    figures.killed.append("the agent")
    note(f"killed: the agent {BRIDGE}")
    while read_state(source.bridge(BRIDGE) / "agent.pid") is not None:  # noqa: ASYNC110 - no event is set for it
        await asyncio.sleep(0.02)
    await asyncio.to_thread(start_agent_of, source, BRIDGE)


async def _move(bar: Progress, figures: Figures, limit: int, is_disturbed: bool) -> None:
    total = limit or FLIGHTS
    faults: dict[int, Callable[[], Awaitable[None]]] = {}
    if is_disturbed:
        faults[total // 4] = lambda: _kill_leader(SOURCE, figures)
        faults[total // 2] = lambda: _kill_leader(DESTINATION, figures)
        faults[total * 3 // 4] = lambda: _kill_agent(figures)
    publishing = bar.add_task(f"published to {GRANTED} in {SOURCE}", total=total)
    crossing = bar.add_task(f"crossed to {DESTINATION}", total=total)
    began = time.monotonic()
    follow = asyncio.ensure_future(_follow(bar, crossing, figures, began))
    async with connect(SOURCE) as client:
        figures.published = await _publish(client, GRANTED, departures(limit), bar, publishing, faults)
        figures.published_seconds = time.monotonic() - began
        figures.ungranted = await _publish(client, UNGRANTED, rosters(limit), None, None)
    await follow
    reading = bar.add_task(f"read by a subscriber in {DESTINATION}", total=None)
    await _read(bar, reading, figures, limit)


async def _publish(
    client: object,
    name: str,
    records: Iterator[tuple[bytes, bytes]],
    bar: Progress | None,
    task: TaskID | None,
    faults: Mapping[int, Callable[[], Awaitable[None]]] = NOTHING_HAPPENS,
) -> int:
    """Publish them all. `faults`: what happens once so many were sent."""
    import felix

    assert isinstance(client, felix.RegionClient)
    count = 0
    async with client.stream(name).publisher() as publisher:
        for key, payload in records:
            await publisher.send(payload, key)
            count += 1
            if count in faults:
                await faults[count]()
            if bar is not None and task is not None and not count % 500:
                bar.update(task, completed=count)
                await asyncio.sleep(0)
        await publisher.flush()
    if bar is not None and task is not None:
        bar.update(task, completed=count)
    return count


async def _follow(bar: Progress, task: TaskID, figures: Figures, began: float) -> None:
    """Wait until every shard's link has no lag, and the source has everything that is to come."""
    moved, since = -1, time.monotonic()
    async with connect(SOURCE) as client:
        while True:
            links = await client.list_links()
            done = sum(link.crossed + link.withheld + link.filtered for link in links)
            bar.update(task, completed=done)
            if done != moved:
                moved, since = done, time.monotonic()
                figures.crossing_seconds = since - began
            state = await client.describe_stream(GRANTED)
            wanted = sum(shard.high_watermark for shard in state.state)
            if figures.published and done >= wanted >= figures.published:
                return
            if time.monotonic() - since > CATCH_UP_IDLE_S:
                reasons = "; ".join(f"shard {link.shard}: {link.state} {link.reason}" for link in links)
                raise RequestError(
                    f"Nothing has crossed for {CATCH_UP_IDLE_S:.0f} s ({reasons or 'no link has reported'}).",
                    hint="See the agent's log in the demo's folder.",
                )
            await asyncio.sleep(0.2)


class _Arrived(msgspec.Struct):
    tailnum: str | None = None
    hour: int | None = None
    minute: int | None = None


async def _read(bar: Progress, task: TaskID, figures: Figures, limit: int) -> None:
    """Read everything in the destination, and look for what must not be there."""
    tails = set()
    for _, payload in departures(limit):
        tails.add(msgspec.json.decode(payload, type=_Arrived).tailnum)
    decoder = msgspec.json.Decoder(_Arrived)
    async with connect(DESTINATION) as client:
        streams = [state async for state in client.list_streams()]
        figures.foreign_streams = sum(state.stream != GRANTED for state in streams)
        wanted = sum(
            shard.high_watermark for state in streams for shard in state.state if state.stream == GRANTED
        )
        bar.update(task, total=wanted)
        if not wanted:
            return
        async with client.stream(GRANTED).subscribe("earliest") as subscription:
            async for batch in subscription.batches():
                for view in batch.payloads():
                    arrived = decoder.decode(view)
                    leaked = (
                        arrived.tailnum in tails or arrived.hour is not None or arrived.minute is not None
                    )
                    figures.leaks += leaked
                figures.delivered += len(batch)
                bar.update(task, completed=figures.delivered)
                if figures.delivered >= wanted:
                    return


def _attempt_refused(figures: Figures) -> None:
    """The bridge's own identity asks for the ungranted stream, and is refused."""
    try:
        run(bridge_command.attempt(SOURCE, BRIDGE, UNGRANTED, figures.grant))
    except FelixError as error:
        note(f"refused, as it must be: {error.sentence}")
        return
    raise RequestError(f"{UNGRANTED} was handed to the bridge, and no grant allows it.")


def _await_cosignatures(home: Path) -> None:
    """Wait until every log is cosigned as it is, down to the refusal that came last; no longer than COSIGNED_S."""
    until = time.monotonic() + COSIGNED_S
    seen, since = _signed_and_cosigned(home), time.monotonic()
    while (now := time.monotonic()) < until:
        if (sizes := _signed_and_cosigned(home)) != seen:
            seen, since = sizes, now
        elif now - since >= STILL_S and all(0 < signed <= cosigned for signed, cosigned in sizes):
            return
        time.sleep(0.2)


def _signed_and_cosigned(home: Path) -> list[tuple[int, int]]:
    """The sizes of each log's newest checkpoint, and of the newest that another region cosigned."""
    return [
        (
            claimed_size(Folder(path).read(CHECKPOINT_PATH) or b""),
            claimed_size(Folder(path).read(COSIGNED_PATH) or b""),
        )
        for path in _logs(home).values()
    ]


# -- verify, report, reconcile -------------------------------------------------------------------------


def _logs(home: Path) -> dict[str, Path]:
    source, destination = RegionFolder.of(SOURCE, home), RegionFolder.of(DESTINATION, home)
    return {
        "egress": source.bridge(BRIDGE) / "egress",
        "ingress": own_log(destination, load_config(destination.config)),
        "source": own_log(source, load_config(source.config)),
    }


def _verify(home: Path, figures: Figures) -> dict[str, Verification]:
    trust = trusted(None)
    found = {}
    for name, path in _logs(home).items():
        report = found[name] = verify_one(path, trust)
        figures.leaves[name] = report.size
        figures.verified[name] = report.ok
        figures.cosigned[name] = report.cosigned_size
        for finding in report.findings[:5]:
            err.print(f"{name} log, step {finding.step}: {finding.sentence}", style="red")
    for header in _headers(_logs(home)["egress"]):
        if header[0] is Kind.INTENT:
            figures.crossed += header[1]
        elif header[0] is Kind.WITHHELD:
            figures.withheld += header[1]
        elif header[0] is Kind.ACK:
            figures.acknowledged += header[1]
    kinds = Counter(kind for kind, _ in _headers(_logs(home)["source"]))
    figures.denied = kinds[Kind.DENY]
    return found


def _headers(path: Path) -> Iterator[tuple[Kind, int]]:
    """Kind and records of every leaf, straight from the files."""
    folder = Folder(path)
    data = folder.read(CHECKPOINT_PATH)
    assert data is not None
    size = int(parse_note(data).text.split("\n")[1])
    for _, entry in read_entries(folder, 0, size, size):
        header = decode_leaf(entry).header
        yield header.kind, header.records


def _report(home: Path, figures: Figures) -> None:
    from audit.spark.session import require_spark

    require_spark()
    from audit.spark.report import run_report

    trust = trusted(None)
    with progress(counted=False) as bar:
        task = bar.add_task("starting Spark", total=None)
        result = run_report(
            list(_logs(home).values()),
            home / "report",
            trust=trust,
            tell=lambda sentence: bar.update(task, description=sentence),
        )
    totals = result.report.totals
    figures.reported = totals.records
    figures.page = str(result.page)
    if result.exit_code:
        note(f"the report finds {totals.differences} differences and {totals.breaches} breaches")


def reconcile(
    figures: Figures, verifications: dict[str, Verification], limit: int, *, with_report: bool
) -> list[str]:
    """The counts that do not reconcile, a sentence each; empty if all do."""
    wanted = limit or FLIGHTS
    checks = [
        (figures.published == wanted, f"{figures.published:,} records were published, not {wanted:,}"),
        (
            figures.published == figures.crossed + figures.withheld,
            f"published {figures.published:,} is not crossed {figures.crossed:,} + withheld {figures.withheld:,}",
        ),
        (
            figures.crossed == figures.delivered == figures.acknowledged,
            f"crossed {figures.crossed:,}, acknowledged {figures.acknowledged:,} and delivered {figures.delivered:,} differ",
        ),
        (figures.leaks == 0, f"{figures.leaks:,} records in {DESTINATION} show what must not cross"),
        (figures.foreign_streams == 0, f"{figures.foreign_streams} ungranted streams are in {DESTINATION}"),
        (figures.denied > 0, "the refused attempt is not in the audit log"),
        (figures.cosigned.get("egress", 0) > 0, f"{DESTINATION} has not cosigned the egress log"),
        (figures.cosigned.get("ingress", 0) > 0, f"{SOURCE} has not cosigned the ingress log"),
        *((ok.ok, f"the {name} log does not verify") for name, ok in verifications.items()),
    ]
    if with_report:
        checks.append(
            (
                figures.reported == figures.crossed,
                f"the report counts {figures.reported:,} records, not {figures.crossed:,}",
            )
        )
    return [sentence for holds, sentence in checks if not holds]


def _print(figures: Figures, home: Path, seconds: float, problems: list[str]) -> None:
    published_rate = figures.published / max(figures.published_seconds, 1e-9)
    crossed_rate = figures.crossed / max(figures.crossing_seconds, 1e-9)
    rows: list[list[object]] = [
        [
            f"published in {SOURCE}",
            figures.published,
            f"{GRANTED}, {published_rate:,.0f} a second, each synced to disk",
        ],
        ["crossed", figures.crossed, f"{crossed_rate:,.0f} a second, each in the audit log before it left"],
        ["withheld", figures.withheld, "no tail number to pseudonymize: the transform fails closed"],
        [f"delivered in {DESTINATION}", figures.delivered, "read back by a subscriber there"],
        ["showing what must not cross", figures.leaks, "tail numbers, dropped fields"],
        [
            f"kept in {SOURCE}",
            figures.ungranted,
            f"{UNGRANTED}: no grant, {figures.foreign_streams} of its streams elsewhere",
        ],
        ["denied", figures.denied, "attempts on the ungranted stream, in the audit log"],
    ]
    if figures.killed:
        rows.append(["killed on the way", len(figures.killed), ", ".join(figures.killed)])
    for name, ok in figures.verified.items():
        rows.append(
            [
                f"{name} audit leaves",
                figures.leaves[name],
                styled(
                    verdict(ok, "verifies", "DOES NOT VERIFY"),
                    f", cosigned up to {figures.cosigned[name]:,}",
                ),
            ]
        )
    if figures.page:
        rows.append(["in the report", figures.reported, figures.page])
    table(f"Felix: {SOURCE} → {DESTINATION}, {seconds:.0f} s", ["", "records#", ""], rows)
    if problems:
        for problem in problems:
            err.print(f"does not reconcile: {problem}", style="bold red")
    else:
        out.print(styled(("Every number reconciles.", "green")))
    out.print(
        f"Everything is in {home}; look around with FELIX_HOME={home}, for example: felix audit show --region {SOURCE}"
    )
