"""`felix region`: found a region, run its broker, trust another region."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli.copy_audit_log import copy_audit_log
from cli.free_address import free_address
from cli.notify import Notifier
from cli.operate import copies_text, drain, rebalance, recover_shard, retire, scale, undrain
from cli.output import counted, iso, lines, note, out, print_json, styled, table
from cli.process import (
    LOCK_TIMEOUT_S,
    START_REFUSED_S,
    PidFile,
    failure,
    read_state,
    start_detached,
    stop,
)
from cli.reconcile import reconcile
from cli.setting import (
    REGION_VARIABLE,
    JsonOption,
    RegionOption,
    choose_region,
    connect,
    folder_of,
    known_regions,
    one_of,
    preferred_region,
    read_file,
    run,
    stop_signals,
)
from cli.to_cluster import to_cluster
from cli.trust import ended_in_words, offer, trust
from cli.untrust import untrust
from felix.address import Address
from felix.collector import start_kept
from felix.errors import Code, FelixError, RequestError, TamperError, UnavailableError
from felix.expiry import until_text
from felix.files import write_output
from felix.messages import BrokerState, RegionState
from felix.profile import load_profile
from felix.runtime.real import now_ms
from felix.visible import spelled_out
from keys.bundle import AuditKey, decode_bundle
from region.folder import RegionFolder

if TYPE_CHECKING:  # the broker itself is loaded by the command that runs it
    from audit.trust import RegionTrust
    from region.config import RegionConfig
    from region.metadata.port import MetadataStore
    from region.node import Node

app = typer.Typer(no_args_is_help=True)
app.command("offer")(offer)
app.command("trust")(trust)
app.command("untrust")(untrust)
app.command("drain")(drain)
app.command("undrain")(undrain)
app.command("rebalance")(rebalance)
app.command("retire")(retire)
app.command("scale")(scale)
app.command("recover-shard")(recover_shard)
app.command("reconcile")(reconcile)
app.command("to-cluster")(to_cluster)
app.command("copy-audit-log")(copy_audit_log)

Name = Annotated[str, typer.Argument(help="The region's name, a DNS label such as us-east.")]
PROBLEMS_SHOWN: Final = 10
"""Of one region, one a line; the rest is counted."""
OptionalName = Annotated[
    str,
    typer.Argument(help=f"The region; else ${REGION_VARIABLE}, else that of `felix use`, else the only one."),
]


@app.command()
def init(
    name: Name,
    mesh: Annotated[
        str, typer.Option(help="Needed. The mesh it belongs to: regions exchange records within one.")
    ] = "",
    country: Annotated[str, typer.Option(help="ISO 3166-1 alpha-2, for reports.")] = "",
    jurisdiction: Annotated[str, typer.Option(help="As policies call it, for example EU.")] = "",
    entity: Annotated[str, typer.Option(help="The legal entity that runs it, for reports.")] = "",
    contact: Annotated[
        str, typer.Option(help="Whom others ask about it, as in 'Data Office, +1 206 555 0100'.")
    ] = "",
    listen: Annotated[str, typer.Option(help="host:port (UDP) of the broker.")] = "",
    health: Annotated[str, typer.Option(help="host:port of metrics and health; `none` for none.")] = "",
) -> None:
    """Make a region: its authority, its keys, its configuration and an operator's profile."""
    from region.bootstrap import found_region
    from region.config import load_config

    folder = RegionFolder.of(name)
    taken = [load_config(RegionFolder.of(other).config) for other in known_regions()]
    if not mesh:
        raise _no_mesh(name, sorted({config.mesh for config in taken}))
    address = parse_option(listen, "--listen") if listen else free_address(7443, [], socket.SOCK_DGRAM)
    health_address = None
    if health != "none":
        health_address = (
            parse_option(health, "--health") if health else free_address(8080, [], socket.SOCK_STREAM)
        )
    if folder.root.is_dir() and any(folder.root.iterdir()):
        if not any(path.exists() for path in (folder.config, folder.profile, folder.root / "data")):
            raise RequestError(
                f"{folder.root} has a part of a region {name}, and no {folder.config.name}: `felix region init` was cut off there, or is under way.",
                code=Code.ALREADY_EXISTS,
                hint="Where none is under way, remove the folder, and run this again: nobody knows any of its keys yet.",
            )
        raise RequestError(
            f"There is a region {name} already: {folder.root} is not empty.",
            code=Code.ALREADY_EXISTS,
            hint="Choose another name, or remove the folder if all of the region may be lost.",
        )
    country = country or _guess_country(name)
    signed = found_region(
        folder,
        region=name,
        mesh=mesh,
        country=country,
        jurisdiction=jurisdiction or ("EU" if country in _EU else country),
        entity=entity,
        contact=contact,
        listen=address,
        health=health_address,
        now_ms=now_ms(),
    )
    out.print(styled("Region ", (name, "bold"), f" of mesh {mesh} is created in {folder.root}"))
    out.print(f"  listens at    {address} (UDP), health {health_address or 'none'}")
    out.print(f"  country       {signed.bundle.country}, jurisdiction {signed.bundle.jurisdiction}")
    out.print(f"  entity        {entity or 'not named'}, contact {contact or 'not named'}")
    out.print(f"  fingerprint   {signed.bundle.fingerprint()}")
    out.print(
        f"Regions exchange within one mesh, and its name stays: agree on {mesh!r} with the others' operators."
    )
    out.print(f"Next: felix region up {name}")
    out.print(
        f"Who approves grants has an identity for it: felix identity issue NAME --kind approver --region {name}"
    )


def _no_mesh(name: str, known: list[str]) -> RequestError:
    """`known`: the meshes that this machine's regions are of."""
    return RequestError(
        f"Region {name} needs a mesh: the regions that may exchange records with each other, under one name that stays.",
        hint=f"Give all of them the same name: felix region init {name} --mesh {known[0] if known else 'acme'}",
    )


_EU = frozenset(
    [
        "AT",
        "BE",
        "BG",
        "HR",
        "CY",
        "CZ",
        "DK",
        "EE",
        "FI",
        "FR",
        "DE",
        "GR",
        "HU",
        "IE",
        "IT",
        "LV",
        "LT",
        "LU",
        "MT",
        "NL",
        "PL",
        "PT",
        "RO",
        "SK",
        "SI",
        "ES",
        "SE",
    ]
)
_GUESSES = {"us": "US", "eu": "IE", "uk": "GB", "ca": "CA", "sa": "BR", "cn": "CN", "in": "IN"}


def _guess_country(name: str) -> str:
    prefix = name.split("-")[0]
    guessed = _GUESSES.get(prefix, "")
    if not guessed:
        raise RequestError(
            f"The country of {name} is not clear from its name.",
            hint="Say it with --country, as in --country DE.",
        )
    note(f"country {guessed}, from the region's name; say another with --country")
    return guessed


def parse_option(text: str, option: str) -> Address:
    """An address that an option gives. Raises RequestError(INVALID): it is no file that is wrong."""
    try:
        return Address.parse(text)
    except RequestError as error:
        raise RequestError(f"{option}: {error.sentence}") from error


@app.command()
def up(
    name: OptionalName = "",
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Run apart from this terminal.")] = False,
    brokers: Annotated[
        int,
        typer.Option(
            help="Run the region with this many brokers on this machine. Written into region.yaml, with an etcd of their own where it names none.",
            min=0,
        ),
    ] = 0,
    broker: Annotated[
        str, typer.Option(help="Run this one of several brokers (cluster.brokers in region.yaml).")
    ] = "",
    replicas: Annotated[
        int,
        typer.Option(
            help="With --brokers: copies of a new stream that does not say how many. On one machine they outlive a broker's process, not the machine. Written into region.yaml.",
            min=0,
        ),
    ] = 0,
    host: Annotated[
        str,
        typer.Option(
            help="With --broker: the machine that it runs on, where the host name is not that, as in a container. Copies are on different ones."
        ),
    ] = "",
    zone: Annotated[str, typer.Option(help="With --broker: its zone. Copies are spread over zones.")] = "",
    replace_folder: Annotated[
        bool,
        typer.Option(
            "--replace-folder",
            help="With --broker, once: its data folder is a new, empty one, and what was in the one before is given up.",
        ),
    ] = False,
    region: RegionOption = "",
) -> None:
    """Run the region's broker, in the foreground until it is interrupted, or apart with --detach."""
    from cli.clash import told

    name = choose_region(one_of(name, region))
    folder, config = folder_of(name)
    if brokers and broker:
        raise RequestError("--brokers runs all of them, --broker one.", hint="Give one of the two.")
    if config.cluster is not None and not broker:
        from cli.several import are_all_here

        if are_all_here(folder, config):
            brokers = brokers or len(config.cluster.brokers)
    if replace_folder and not broker:
        raise RequestError("--replace-folder is of one of several brokers.", hint="Say which with --broker.")
    if (host or zone) and not broker:
        raise RequestError(
            "--host and --zone are of one of several brokers.", hint="Say which with --broker."
        )
    if replicas and not brokers:
        raise RequestError(
            "--replicas is of a region that this command gives several brokers.",
            hint="Give --brokers as well, or write replicas: into cluster: of region.yaml.",
        )
    if brokers:
        from cli.several import make_cluster

        config = make_cluster(folder, config, brokers, free_address, replicas)
    elif broker or config.cluster is not None:
        config = config.of_broker(broker or config.broker).placed(host, zone)
        if _has_own_etcd(folder):
            from cli.several import check_own_etcd

            check_own_etcd(folder, config)
    if detach:
        words = ["--brokers", str(brokers)] if brokers else ["--broker", broker] if broker else []
        words += [
            word
            for option, value in (("--host", host), ("--zone", zone))
            if value
            for word in (option, value)
        ]
        words += ["--replace-folder"] if replace_folder else []
        state = start_detached(
            ["--log-level", "info", "region", "up", name, *words],
            _pid_file(folder, broker),
            folder.broker_log,
            f"The broker of {name}",
            f"felix region down {name}",
        )
        out.print(f"{name} serves at {state['address']}, process {state['pid']}, log {folder.broker_log}")
        failed = state.get("failed", [])
        if brokers and _has_own_etcd(folder):
            from cli.several import etcd_warning

            if said := etcd_warning():
                note(said)
        _tell_of_agents()
        if failed:
            raise UnavailableError(
                " ".join(sentence for sentence, _ in failed),
                hint=f"The other brokers serve, and {'it is' if len(failed) == 1 else 'these are'} tried again meanwhile. "
                + " ".join(hint for _, hint in failed),
            )
        return
    logging.getLogger("felix").setLevel(logging.INFO)
    what = f"Broker {broker} of {name}" if broker else f"The broker of {name}"
    # Where `felix region up` runs all brokers, it tries to start this one now and then.
    wait_s = START_REFUSED_S if replace_folder else LOCK_TIMEOUT_S
    pid = PidFile(_pid_file(folder, broker), what, f"felix region down {name}", wait_s=wait_s)
    try:
        with told(f"set another address in {folder.config} (listen:, or health:)."):
            if brokers:
                from cli.several import serve_all

                run(serve_all(folder, config, pid))
            else:
                run(_serve(folder, config, pid, replace_folder=replace_folder))
    finally:
        pid.close()


def _has_own_etcd(folder: RegionFolder) -> bool:
    from cli.several import ETCD_FOLDER

    return (folder.root / ETCD_FOLDER).is_dir()


def _pid_file(folder: RegionFolder, broker: str) -> Path:
    """Of the process that serves; of one of several on this machine, its own."""
    return folder.pid_of(broker) if broker else folder.broker_pid


def _pid_files(folder: RegionFolder, config: RegionConfig) -> list[tuple[Path, str]]:
    """Where each of a region's several brokers says that it runs, if it does on this machine, and what it is."""
    brokers = [] if config.cluster is None else [str(each.id) for each in config.cluster.brokers]
    return [(folder.pid_of(broker), f"Broker {broker} of {config.region}") for broker in brokers]


async def _serve(
    folder: RegionFolder, config: RegionConfig, pid: PidFile, *, replace_folder: bool = False
) -> None:
    from felix.telemetry import configure_tracing
    from region.bootstrap import write_profile
    from region.node import Node

    stop_tracing = configure_tracing(
        config.tracing, folder.root, service="felix-broker", instance=config.broker, region=config.region
    )
    stop = stop_signals()
    async with Notifier.from_environment() as notifier:
        with start_kept():
            node = await Node.start(folder, config, replace_folder=replace_folder)
        try:
            address = node.address
            # What region.yaml says of several brokers is where clients reach each.
            several = (
                [] if config.cluster is None else [each.client_address for each in config.cluster.brokers]
            )
            if config.listen.port == 0 or _is_outdated(folder, config.region, address, several):
                await asyncio.to_thread(
                    write_profile, folder, config.region, config.mesh, *(several or [address])
                )
                await asyncio.to_thread(_tell_of_agents)
            health = node.health.address if node.health is not None else None
            pid.announce(
                address=str(address),
                health="" if health is None else f"{health[0]}:{health[1]}",
                started_ms=now_ms(),
            )
            notifier.serving(lambda: _status_line(node))
            note(
                f"{node.config.region} serves at {address}; end it with Ctrl-C or: felix region down {node.config.region}"
            )
            await _stopped(node, stop)
        finally:
            notifier.stopping()
            await node.stop()
            stop_tracing()


async def _stopped(node: Node, stop: asyncio.Event) -> None:
    """Wait for a signal. Raises FelixError where the broker can never serve again."""
    ended = asyncio.ensure_future(node.ended())
    signalled = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([ended, signalled], return_when=asyncio.FIRST_COMPLETED)
        if ended.done() and not signalled.done():
            raise ended.result()
    finally:
        ended.cancel()
        signalled.cancel()


def _tell_of_agents() -> None:
    """Say which agents of this home look for a region where it is not any more."""
    from bridge.config import load_config
    from cli.agent import agents_here, moved

    for files in agents_here():
        with suppress(RequestError):
            for each in moved(load_config(files.config)):
                note(each)


def _status_line(node: Node) -> str:
    """What the service manager shows of a broker that serves."""
    gauges = node.broker.gauges()
    return (
        f"{node.config.region} serves at {node.address}: "
        f"{gauges['sessions']:.0f} sessions, {gauges['streams']:.0f} streams"
    )


def _is_outdated(folder: RegionFolder, region: str, address: Address, several: Sequence[Address]) -> bool:
    """Whether the profile names other brokers than the `several` of the region; of one broker, its host with another port, as after somebody edited
    region.yaml. A profile that names other hosts is then how people reach the region from elsewhere: it stays."""
    try:
        known = load_profile(region, home=folder.root.parent).parsed_addresses()
    except RequestError:
        return False
    if several:
        return {*known} != {*several}
    return address not in known and all(each.host == address.host for each in known)


@app.command()
def down(name: OptionalName = "", region: RegionOption = "") -> None:
    """Stop the region's broker, all of them where several run here; what is under way is answered first."""
    name = choose_region(one_of(name, region))
    folder, config = folder_of(name)
    running = [(folder.broker_pid, f"The broker of {name}")]
    if read_state(folder.broker_pid) is None:
        # Those that were started by themselves: felix region up --broker.
        running = [each for each in _pid_files(folder, config) if read_state(each[0]) is not None] or running
    for path, what in running:
        try:
            out.print(f"{name} stopped (process {stop(path, what)})")
        except RequestError as error:
            if error.code is not Code.NOT_FOUND or len(running) == 1:
                raise
            # The others end by themselves where their parent was killed.
            out.print(f"{what} has stopped")


@app.command()
def ready(
    name: Annotated[str, typer.Argument(help="The region; the only one if left out.")] = "",
    in_sync: Annotated[
        bool,
        typer.Option(
            "--in-sync", help="Also that every copy of it is in sync: then another broker may be stopped."
        ),
    ] = False,
    region: RegionOption = "",
) -> None:
    """Say whether the region's brokers on this machine serve; exit code 4, with the reason, if not. For health checks, and between the steps of a
    rolling restart."""
    from cli.ready import check_ready

    region = choose_region(one_of(name, region))
    folder, config = folder_of(region)
    # Of several machines' brokers, those that run here; where all run here, all of them.
    running = [each for each in _pid_files(folder, config) if _has_own_etcd(folder) or each[0].exists()]
    for path, what in running or [(folder.broker_pid, f"The broker of {region}")]:
        check_ready(path, what, in_sync=in_sync)


@app.command()
def status(
    name: Annotated[
        str,
        typer.Argument(help=f"The region; else ${REGION_VARIABLE}, else that of `felix use`, else all."),
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="All regions, whatever is set.")] = False,
    region: RegionOption = "",
    json: JsonOption = False,
) -> None:
    """Which brokers run, where, and how full their named limits are."""
    name = "" if every else one_of(name, region) or preferred_region()
    found = [_status(each) for each in ([choose_region(name)] if name else known_regions())]
    if json:
        print_json(found)
        return
    if name:
        for row in found:
            _print_problems(row)
    columns = ["region", "mesh", "country", "state", "address", "process#", "started"]
    table(
        "Regions",
        [
            *(column if column != "started" else "since" for column in columns),
            *(() if name else ("problem",)),
        ],
        [
            [
                *(
                    "" if (cell := row[column.rstrip("#").replace("process", "pid")]) is None else str(cell)
                    for column in columns
                ),
                *(() if name else (row["problems"] or [""])[:1]),
            ]
            for row in found
        ],
    )
    for row in found:
        for notice in row["expiring"]:
            out.print(f"{notice['name']} {until_text(notice['not_after_ms'], now_ms())}: {notice['advice']}")
    if name and found:
        out.print(f"entity {found[0]['entity'] or 'not named'}, contact {found[0]['contact'] or 'not named'}")
    if name and found and found[0]["brokers"]:
        table(
            "Brokers",
            ["broker", "address", "process#", "streams led#", "copies#", "in sync#", "lag records#", "role"],
            [
                [
                    each["broker"],
                    each["address"] or "not alive",
                    "" if each["pid"] is None else str(each["pid"]),
                    each["leads"],
                    each["copies"],
                    each["in_sync"],
                    each["lag_records"],
                    ", ".join(
                        role
                        for role, has in (
                            ("controller", each["is_controller"]),
                            ("audit log", each["has_audit_log"]),
                            ("drained", each["is_drained"]),
                        )
                        if has
                    ),
                ]
                for each in found[0]["brokers"]
            ],
        )
        if moving := found[0]["moving"]:
            out.print(f"{counted(moving, 'shard')} {'is' if moving == 1 else 'are'} moving")
        out.print(f"a new stream has {copies_text(found[0]['replicas'])}, unless it says how many")
    if name and found and found[0]["gauges"]:
        gauges = found[0]["gauges"]
        assert isinstance(gauges, dict)
        rows = [
            [key, int(value), int(gauges[f"{key}_limit"]) if f"{key}_limit" in gauges else None]
            for key, value in gauges.items()
            if not key.endswith("_limit")
        ]
        of = f"Broker {found[0]['broker']}, which answered" if found[0]["brokers"] else "Broker"
        table(of, ["gauge", "now#", "limit#"], rows)


def _print_problems(row: dict[str, Any]) -> None:
    """What is wrong, the most serious first, then what is as an operator has it."""
    for problem in row["problems"][:PROBLEMS_SHOWN]:
        out.print(styled((f"problem: {spelled_out(problem)}", "bold red")))
    if (more := len(row["problems"]) - PROBLEMS_SHOWN) > 0:
        out.print(f"and {more:,} more: --json shows all")
    for remark in row["remarks"]:
        out.print(styled(f"remark: {spelled_out(remark)}"))


def _ends_here(region: str, brokers: Sequence[BrokerState], named: Sequence[str] = ()) -> list[str]:
    """Of brokers that are not alive and do not run on this machine, though they did: why each ended, by its own last words. `named`: in region.yaml, among
    them those that the metadata store does not know."""
    from cli.several import log_file

    folder, found = RegionFolder.of(region), []
    known = {each.broker: bool(each.address) for each in brokers}
    for broker in dict.fromkeys([*known, *named]):
        said = log_file(folder, broker)
        if known.get(broker) or not said.exists() or read_state(folder.pid_of(broker)) is not None:
            continue
        with suppress(OSError):
            words = failure(said)
            if words is not None:
                told = " ".join(filter(None, (words.sentence, words.hint)))
                found.append(f"Broker {broker} ended here: {told} See {said}.")
    return found


def _process_here(folder: RegionFolder, broker: str) -> int | None:
    """The id of a broker's process on this machine; None where it runs on another one, or not at all."""
    state = read_state(folder.pid_of(broker))
    return None if state is None else int(state["pid"])


def _status(region: str) -> dict[str, Any]:
    """One region, as far as its state can be read: the rest is its `problem`."""
    from cli.expiry import expiring

    folder = RegionFolder.of(region)
    row: dict[str, Any] = {"region": region, "mesh": "", "country": "", "state": "down", "address": ""}
    row |= {
        "entity": "",
        "contact": "",
        "pid": None,
        "started": "",
        "broker": "",
        "gauges": {},
        "problem": "",
        "problems": [],
        "remarks": [],
        "expiring": [],
        "brokers": [],
        "replicas": 0,
        "moving": 0,
    }
    try:
        _, config = folder_of(region)
        row |= {"mesh": config.mesh, "country": config.country, "address": str(config.listen)}
        row |= {"entity": config.entity, "contact": config.contact}
        row["expiring"] = expiring(folder, config, now_ms())
        state = _running(folder, config)
        if state is not None:
            row |= {"state": "up", "address": state["address"], "pid": state["pid"]}
            row["started"] = iso(state["started_ms"])
            broker = run(_describe(region))
            row["broker"], row["gauges"] = broker.broker, broker.gauges
            row["brokers"] = [
                {
                    "broker": each.broker,
                    "address": each.address,
                    "pid": _process_here(folder, each.broker),
                    "leads": each.leads,
                    "is_controller": each.is_controller,
                    "has_audit_log": each.has_audit_log,
                    "copies": each.copies,
                    "in_sync": each.in_sync,
                    "lag_records": each.lag_records,
                    "alone": each.alone,
                    "is_drained": each.is_drained,
                }
                for each in broker.brokers
            ]
            row["replicas"], row["moving"] = broker.replicas, broker.moving
            named = [] if config.cluster is None else [str(each.id) for each in config.cluster.brokers]
            row["problems"] = [*broker.alarms, *_ends_here(region, broker.brokers, named)]
            row["remarks"] = broker.remarks
            row["expiring"] = expiring(folder, config, now_ms(), broker.expiring)
    except FelixError as error:
        row["problems"] = [error.sentence]
    row["problem"] = " ".join(row["problems"])
    return row


def _running(folder: RegionFolder, config: RegionConfig) -> dict[str, Any] | None:
    """What the region's broker said when it began to serve, or one of several on this machine; None where none runs."""
    paths = (folder.broker_pid, *(path for path, _ in _pid_files(folder, config)))
    return next((state for path in paths if (state := read_state(path)) is not None), None)


async def _describe(region: str) -> RegionState:
    async with connect(region) as client:
        return await client.describe()


@app.command()
def bundle(
    region: RegionOption = "",
    fingerprint: Annotated[
        bool, typer.Option("--fingerprint", help="Only the fingerprint, to tell another region's operator.")
    ] = False,
    whole: Annotated[
        bool,
        typer.Option("--whole", help="With --fingerprint: that of the whole bundle, bridges' logs with it."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show what other regions need to know of this one; give them the file bundle.json."""
    folder, _ = folder_of(region)
    signed = decode_bundle(read_file(folder.bundle, "The bundle"))
    held = signed.bundle
    if whole and not fingerprint:
        raise RequestError(
            "--whole says which --fingerprint.", hint="felix region bundle --fingerprint --whole"
        )
    if fingerprint:
        out.print(held.whole_fingerprint() if whole else held.fingerprint())
        return
    if json:
        print_json(
            held,
            former_keys=held.former,
            fingerprint=held.fingerprint(),
            signature=signed.signature,
            file=folder.bundle,
        )
        return
    table(
        f"Bundle of {held.region}",
        ["", ""],
        [
            ["file", str(folder.bundle)],
            ["mesh", held.mesh],
            ["country", held.country],
            ["jurisdiction", held.jurisdiction],
            ["issued", iso(held.issued_ms)],
            ["audit logs and cosigners", lines(map(_named, held.audit_keys))],
            *([["former keys", ended_in_words(held.former)]] if held.former else []),
            ["fingerprint", held.fingerprint()],
        ],
    )


def _named(key: AuditKey) -> str:
    """A log or witness, and which checkpoints the key signs where there is another one besides."""
    end = f" up to {key.to_size:,} leaves" if key.to_size is not None else ""
    return key.name + (f" from {key.from_size:,}" if key.from_size else "") + end


@app.command("add-log-keys")
def add_log_keys_(region: RegionOption = "") -> None:
    """Give logs and witness of a region that version 0.1 founded their ML-DSA-44 keys.

    Their Ed25519 keys stay, and what they signed holds as before. The bundle is signed again; other regions accept it only by
    its fingerprint, because it names one more key of a log and a witness that they trust.
    """
    from region.bootstrap import add_log_keys

    folder, config = folder_of(region)
    signed = add_log_keys(folder, config, now_ms())
    if signed is None:
        out.print(f"Every log of {config.region}, and its witness, has an ML-DSA-44 key already.")
        return
    # Of the whole bundle: bridges' logs, too, have one more key now.
    fingerprint = signed.bundle.whole_fingerprint()
    out.print(f"{folder.bundle} names the new keys; the whole bundle's fingerprint is {fingerprint}")
    out.print(
        f"They sign from the next start of the broker of {config.region} and of its bridges' agents on."
    )
    out.print("Have each region that trusts this one take the file, and read its operator the fingerprint:")
    _print_trust(folder, fingerprint)


def _print_trust(folder: RegionFolder, fingerprint: str) -> None:
    """The command of each region that is to take the bundle."""
    out.print(f'  felix region trust {folder.bundle} --region OTHER --fingerprint "{fingerprint}"')


@app.command("change-log-keys")
def change_log_keys_(
    region: RegionOption = "",
    bridge: Annotated[
        str, typer.Option(help="Of this bridge's egress log; the region's own log if left out.")
    ] = "",
    log: Annotated[
        Path | None, typer.Option(help="Where the log lies, if not in the region's folder.")
    ] = None,
    lost_keys: Annotated[
        bool,
        typer.Option(
            "--lost-keys",
            help="The keys before are not here any more: they sign up to the last checkpoint that they have signed.",
        ),
    ] = False,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[BROKER=]FILE",
            help="Of a log that several brokers have copies of: BROKER=FILE, the newest checkpoint of a broker whose copy is on another machine. FILE alone: with --lost-keys, and of such a log, "
            "a checkpoint that lies elsewhere, where it may be later than those at hand. Repeatable.",
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BROKER",
            help="Of a log that several brokers have copies of: a broker whose copy is gone, or that has none. Repeatable.",
        ),
    ] = None,
    begin_anew: Annotated[
        bool,
        typer.Option(
            "--begin-anew",
            help="Of a log that several brokers have copies of: a change was begun elsewhere, nobody has the keys that it made, and no broker was started with them.",
        ),
    ] = False,
    as_it_is: Annotated[
        bool,
        typer.Option(
            "--as-it-is",
            help="Though a checkpoint is known that the log does not reach: it is of another history, which a thief of the keys signed and had cosigned.",
        ),
    ] = False,
) -> None:
    """Give an audit log new keys. The ones before sign up to its last checkpoint, and nothing behind it.

    The log's brokers, all of them, or its agent are stopped meanwhile. The bundle is signed again; other regions accept it only by its fingerprint.
    """
    from audit.origin import egress_origin, region_origin
    from audit.trust import RegionTrust
    from cli.audit import remembered_here
    from cli.stopped_region import StoppedRegion
    from felix import __version__
    from felix.storage.disk import PRIVATE_FILES
    from felix.storage.release_mark import require_release
    from region.copied_log import is_copied
    from region.trust.log_keys import change_log_keys

    folder, config = folder_of(region)
    written = (
        [log or folder.bridges / bridge / "egress"]
        if bridge
        else [folder.root / data for data in config.data_folders]
    )
    for path in written:
        require_release(PRIVATE_FILES, path, __version__)
    copied = not bridge and is_copied(folder, config)
    if copied and _running(folder, config) is not None:
        raise RequestError(
            f"{config.region} runs here: what it signs meanwhile would stand behind the keys' end.",
            code=Code.CONFLICT,
            hint=f"felix region down {config.region}",
        )
    copies, given = _given_checkpoints(config, checkpoint or [])
    own = RegionTrust(decode_bundle(read_file(folder.bundle, "The bundle")).bundle)
    origin = (
        egress_origin(config.region, config.mesh, bridge)
        if bridge
        else region_origin(config.region, config.mesh)
    )
    notes = [_checkpoint_of(path, note, own, origin) for path, note in given]
    if notes and not lost_keys and not copied:
        raise RequestError("--checkpoint goes with --lost-keys: keys that are here sign the log's last one.")
    if checkpoint and as_it_is:
        raise RequestError("--as-it-is asks no checkpoint that lies elsewhere, and --checkpoint names one.")
    notes += remembered_here()
    with StoppedRegion(folder, config) as store:
        changed = change_log_keys(
            folder, config, now_ms(),
            bridge=bridge, log=log, lost_keys=lost_keys, remembered=notes, copies=copies, without=without or (), store=store, anew=begin_anew, as_it_is=as_it_is,
        )  # fmt: skip
    fingerprint = changed.signed.bundle.whole_fingerprint()
    if changed.copies:
        out.print(f"The largest checkpoint of all copies: {changed.copies}")
    out.print(
        f"{changed.origin}: the keys before sign up to {changed.size:,} leaves, the new ones from there on. {folder.bundle} says so; "
        f"the whole bundle's fingerprint is {fingerprint}"
    )
    out.print(
        "Until another region has taken the file, it cosigns nothing of this log. Read its operator the fingerprint:"
    )
    _print_trust(folder, fingerprint)
    if copied:
        for broker in without or ():
            note(
                f"If broker {broker} has shown a checkpoint of more than {changed.size:,} leaves, it holds under no key any more."
            )
        out.print(
            f"Before any broker of {config.region} starts: copy bundle.json, secrets/{folder.audit_key.name} and secrets/{folder.audit_ml_dsa_key.name} to the region's folder on each of its machines."
        )
    for key in RegionTrust(changed.signed.bundle).log_keys(changed.origin):
        if key.to_size is None:
            note(f"For outside witnesses (felix witness add-log --in-place) and policy files: {key}")


def _checkpoint_of(path: str, note: bytes, own: RegionTrust, origin: str) -> bytes:
    """One that a person gave counts: raises RequestError where it is none of this log."""
    from audit.checkpoint import open_checkpoint

    try:
        open_checkpoint(note, own.log_keys(origin))
    except TamperError as error:
        raise RequestError(
            f"{path} has no checkpoint of {origin} that holds under the keys in this folder's bundle. {error.sentence}",
            hint="Leave it out, or give the file of this log. Where somebody else may have signed it: keep it.",
        ) from error
    return note


def _given_checkpoints(
    config: RegionConfig, given: Sequence[str]
) -> tuple[dict[str, bytes], list[tuple[str, bytes]]]:
    """Those of brokers, by name, and further ones, with their paths."""
    copies, notes = dict[str, bytes](), list[tuple[str, bytes]]()
    brokers = [] if config.cluster is None else [each.id for each in config.cluster.brokers]
    for words in given:
        broker, is_named, path = words.partition("=")
        if not is_named or Path(words).exists():
            notes.append((words, read_file(Path(words), "The checkpoint")))
        elif broker in brokers:
            if (earlier := copies.get(broker)) is not None:
                notes.append((f"A file of broker {broker}", earlier))
            copies[broker] = read_file(Path(path), f"The checkpoint of broker {broker}")
        else:
            raise RequestError(
                f"{config.region} has no broker {broker}.",
                code=Code.NOT_FOUND,
                hint=f"Those that cluster.brokers names: {', '.join(brokers) or 'none'}.",
            )
    return copies, notes


@app.command("change-witness-key")
def change_witness_key_(region: RegionOption = "") -> None:
    """Give the region's witness, which cosigns other regions' logs, new keys in place of the ones before.

    Its brokers take them at their next start, and so do its bridges' agents. The bundle is signed again; other regions accept it only by its fingerprint.
    """
    from audit.trust import RegionTrust
    from region.evidence.witness_key import change_witness_key

    folder, config = folder_of(region)
    signed = change_witness_key(folder, config, now_ms())
    fingerprint = signed.bundle.fingerprint()
    out.print(f"{folder.bundle} names the new witness keys; its fingerprint is {fingerprint}")
    out.print(
        f"Start the brokers of {config.region} and its bridges' agents again. Until another region has taken the file, what this one cosigns does not count there. Read its operator the fingerprint:"
    )
    _print_trust(folder, fingerprint)
    for key in RegionTrust(signed.bundle).witnesses:
        note(f"For policy files that list this region's witness: {key}")


@app.command("change-signing-keys")
def change_signing_keys_(
    region: RegionOption = "",
    policy: Annotated[
        bool, typer.Option("--policy", help="The policy key alone; both if none is named.")
    ] = False,
    receipt: Annotated[bool, typer.Option("--receipt", help="The receipt key alone.")] = False,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(
            help="The last checkpoint of a log that lies elsewhere: one of this region's, or another's as this region cosigned it. Repeatable."
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            help="A log in which nothing that the keys signed is to count: one of this region's that is gone or was never written, or another region's; all of that one's by REGION.MESH. Repeatable."
        ),
    ] = None,
    drop_earliest: Annotated[
        int,
        typer.Option(
            help="Name the former keys of so many of the earliest changes no more, to make room: what they signed counts for nothing then."
        ),
    ] = 0,
    lost_bundle: Annotated[
        bool,
        typer.Option(
            "--lost-bundle",
            help="The log says that this bundle's keys were given up, or is not at hand, and nobody has the bundle of the last change: what they signed counts up to the checkpoints that are given alone.",
        ),
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option(
            help="A copy of the region's own audit log (felix audit copy), where the log itself is not on this machine: it says which keys are those of now."
        ),
    ] = None,
    say_again: Annotated[
        bool,
        typer.Option(
            "--say-again",
            help="Change the keys though the audit log has no leaf yet of a denial, pause or revocation: it stays in force where it is kept, and is to be said again.",
        ),
    ] = False,
    raise_ends: Annotated[
        bool,
        typer.Option(
            "--raise-ends",
            help="Change no key: have those that ended last count as far as other regions' logs are cosigned by now, and this region's as --checkpoint says.",
        ),
    ] = False,
    back: Annotated[
        int,
        typer.Option(
            min=1,
            help="With --raise-ends: of which change the keys are, 1 for the last one, 2 for the one before. They count no further than those of the change after it.",
        ),
    ] = 1,
) -> None:
    """Give the region a new policy key and a new receipt key. What the ones before signed counts up to where each log was cosigned, and they sign nothing any more.

    The region's brokers are stopped meanwhile, and agents that run from this folder. The bundle is signed again; other regions accept it only by its
    fingerprint. Policies, halves of grants, pauses and deny entries that are to stand are signed again; docs/keys.md has the steps.
    """
    from cli.audit import remembered_here
    from region.trust.bundle_room import logs_without
    from region.trust.signing_key_leaves import ROLES
    from region.trust.signing_keys import change_signing_keys
    from region.trust.signing_keys import raise_ends as raise_

    folder, config = folder_of(region)
    notes = [read_file(path, "The checkpoint") for path in checkpoint or []]
    if _running(folder, config) is not None:
        raise RequestError(
            f"{config.region} runs here: what it signs meanwhile would stand behind the keys' end.",
            code=Code.CONFLICT,
            hint=f"felix region down {config.region}",
        )
    left_out = logs_without(folder, config, without or ())
    # The log, too, may be one of before: the whole folder was put back from a backup.
    remembered = remembered_here()
    if raise_ends:
        if drop_earliest or lost_bundle or say_again:
            raise RequestError(
                "--drop-earliest, --lost-bundle and --say-again go with a change of keys, not with --raise-ends."
            )
        changed = raise_(
            folder,
            config,
            now_ms(),
            checkpoints=notes,
            without=left_out,
            back=back,
            log=log,
            remembered=remembered,
        )
    else:
        if back != 1:
            raise RequestError("--back goes with --raise-ends, not with a change of keys.")
        named = [role for role, is_named in zip(ROLES, (policy, receipt), strict=True) if is_named]
        changed = change_signing_keys(
            folder,
            config,
            now_ms(),
            named or ROLES,
            checkpoints=notes,
            without=left_out,
            drop_earliest=drop_earliest,
            lost_bundle=lost_bundle,
            log=log,
            remembered=remembered,
            say_again=say_again,
        )
    for sentence in changed.left_out:
        note(sentence)
    table(
        "What the keys before signed counts in",
        ["log", "leaves#"],
        [[end.log, end.size] for end in changed.ends],
    )
    fingerprint = changed.signed.bundle.fingerprint()
    out.print(f"{folder.bundle} says so; its fingerprint is {fingerprint}")
    out.print(
        "Until another region has taken the file, it takes nothing that this one signs. Read its operator the fingerprint:"
    )
    _print_trust(folder, fingerprint)
    if config.cluster is not None and not raise_ends:
        # The brokers write the leaves of the change; none of them knows of it yet.
        try:
            run(_note_given_up(folder, config, may_skip=bool(drop_earliest)))
        except (FelixError, OSError) as error:
            note(
                f"The metadata store does not say yet that the keys before were given up: {_told(error)} Start a broker with the new files first: until one runs, those that have "
                "the folder of before take what is signed with the former keys."
            )
    if folder.lost_bundle.exists() and not raise_ends:
        note(
            f"{folder.lost_bundle} says that these keys take the place of whichever the log names: copy it with bundle.json and secrets/ to the region's other machines, "
            "or their brokers do not start"
        )
    if not raise_ends:
        note(
            "trust the other regions again here, and sign again what is to stand: the policy, halves of grants, pauses and deny entries."
        )


def _told(error: FelixError | OSError) -> str:
    return f"{error.sentence} {error.hint}" if isinstance(error, FelixError) else f"{error}."


async def _note_given_up(folder: RegionFolder, config: RegionConfig, *, may_skip: bool = False) -> None:
    """Have the metadata store say which keys were given up. Raises RequestError, UnavailableError."""
    from cli.stopped_region import STORE_S, with_store
    from keys.key_file import load_signing_key
    from region.metadata.catalog import Catalog
    from region.trust.key_note_store import note_given_up
    from region.trust.signing_keys import keys_made_instead
    from region.trust.trusted_bundles import own_bundle

    own, log_key = own_bundle(folder, config), load_signing_key(folder.audit_key)

    async def ask(store: MetadataStore) -> None:
        catalog = Catalog(store, config.region)
        await note_given_up(catalog, own, log_key, now_ms(), keys_made_instead(folder), may_skip=may_skip)

    await with_store(folder, config, ask, STORE_S)


@app.command()
def csr(
    output: Annotated[Path | None, typer.Option("--out", help="Where to write the request.")] = None,
    region: RegionOption = "",
) -> None:
    """Ask an organisation's CA for a certificate of the region's authority: write a request that it can sign."""
    from keys.authority import load_authority
    from keys.certification import request_certificate

    folder, config = folder_of(region)
    path = output or Path(f"{config.region}.csr")
    write_output(path, request_certificate(load_authority(folder.authority, config.region, config.mesh)))
    out.print(f"The request of {config.region}.{config.mesh} is in {path}")
    out.print("Have it signed as an authority with path length 1, then: felix region certify FILE")


@app.command()
def certify(
    chain_file: Annotated[
        Path,
        typer.Argument(help="The signed certificate and those above it (PEM), the organisation's root last."),
    ],
    region: RegionOption = "",
) -> None:
    """Keep the organisation's certificate of the region's authority: brokers show it to tools that trust the organisation.

    What regions trust stays the certificate that the region signed itself.
    """
    from keys.authority import load_authority
    from keys.certification import certify as check
    from keys.certification import save_certification

    folder, config = folder_of(region)
    authority = load_authority(folder.authority, config.region, config.mesh)
    chain = check(authority, read_file(chain_file, "The certificate"), now_ms())
    save_certification(chain, folder.authority)
    issuer, end = chain[0].issuer.rfc4514_string(), chain[0].not_valid_after_utc
    out.print(styled(f"{config.region}.{config.mesh} is certified by {issuer} until {end:%Y-%m-%d}"))
    if read_state(folder.broker_pid) is not None:
        note("the broker shows it from its next start on")
