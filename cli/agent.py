"""Bridge agents of this machine: their configurations, processes and logs, and `felix bridge init`, which makes one.

An agent runs from its region's folder (`bridges/<name>/bridge.yaml`), or from a configuration that stands anywhere else.
Beside the configuration lie its pid file and the log of an agent that runs apart from a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import msgspec
import typer

from cli.grants import default_bridge
from cli.output import iso, note, out
from cli.peer import addresses_of
from cli.process import read_state, start_detached
from cli.setting import RegionOption, choose_region, folder_of, known_regions, preferred_region
from felix.errors import Code, FelixError, RequestError
from felix.files import PUBLIC, replace_file
from felix.profile import load_profile, parse_address
from felix.runtime.real import now_ms
from keys.bundle import decode_bundle
from region.folder import RegionFolder

if TYPE_CHECKING:
    from bridge.config import BridgeConfig
    from region.config import RegionConfig

_CONFIG: Final = """\
# The bridge agent {name} of {source}, by `felix bridge init`. Yours to edit; it is read at the agent's start.
# What is commented out is left at its default. Paths are relative to `home`, `home` to this file's folder.

# Its identity is spiffe://{source}.{mesh}/bridge/{name}.
name: {name}
mesh: {mesh}
source: {source}

# Brokers of the source, host:port, and the name in their certificates (empty: {source}.{mesh}).
source_addresses: {source_addresses}
# source_server_name: ""

# Regions that records are brought to, 16 at most: where each is reached, the name in its brokers' certificates
# (empty: <region>.{mesh}), and the bundle that it is trusted by (empty: trusted/<region>.json).
destinations:
{destinations}
# The source region's folder, and what of it the agent reads: the region's bundle; the identity (empty:
# identities/{name}.pem); the keys that sign the egress log (identities/{name}.audit.pem, .audit.mldsa.pem);
# the key that data keys are sealed to (identities/{name}.handoff.key).
home: ../..
# bundle: bundle.json
# identity: ""
# egress_key: ""
# egress_ml_dsa_key: ""
# handoff_key: ""

# The folder of the egress log, which has to outlive the agent: where to go on is read from it.
egress: bridges/{name}/egress

# Where /metrics, /livez and /readyz listen; port 0 takes a free one, null none.
health: 127.0.0.1:0

# The QUIC engine, qh3 or aioquic; empty: the native one.
# engine: ""

# Links at once, sealed bytes of a link that are read ahead, and what of it may be on the way without a receipt.
# limits:
#   links: {links}
#   read_ahead: {read_ahead}
#   envelopes: {envelopes}
#   on_the_way: {on_the_way}

# OpenTelemetry: exporter none, file (with path) or otlp (with endpoint), and the share of records that are traced.
# tracing:
#   exporter: none

# Outside witnesses that cosign the egress log, and the quorum without which nothing crosses (docs/witnesses.md).
# witnesses: []
# require_quorum: null
"""


class AgentFiles(NamedTuple):
    """Where an agent's files lie on this machine."""

    config: Path
    pid: Path
    log: Path

    @classmethod
    def beside(cls, config: Path) -> AgentFiles:
        """Of the agent with this configuration."""
        return cls(config, config.parent / "agent.pid", config.parent / "agent.log")

    @property
    def name(self) -> str:
        """As the folder of the configuration is called."""
        return self.config.parent.name

    @property
    def region(self) -> str:
        """The region in whose folder it stands."""
        return self.config.parents[2].name

    @property
    def how_to_stop(self) -> str:
        """The command that stops the agent: by its name, or by its configuration where that is in no region's folder."""
        if self in agents_here():
            return f"felix bridge down {self.name} --region {self.region}"
        return f"felix bridge down --config {self.config}"


def agent_files(folder: RegionFolder, name: str) -> AgentFiles:
    """Configuration, pid file and log of an agent that runs from a region's folder."""
    return AgentFiles.beside(folder.bridge(name) / "bridge.yaml")


def agents_here(region: str = "") -> list[AgentFiles]:
    """Every agent that has a configuration in a region's folder; without one, in any region's of this home."""
    folders = [RegionFolder.of(each) for each in ([region] if region else known_regions())]
    return [
        AgentFiles.beside(path) for folder in folders for path in sorted(folder.bridges.glob("*/bridge.yaml"))
    ]


def choose_agent(name: str, region: str, *, running: bool = False) -> AgentFiles:
    """The agent that a command is about: by its name, in whichever region of this home; else the only one, of the region that
    the user set for all commands if there is such. `running`: where there are several, the only one that runs on this machine.

    Raises RequestError(NOT_FOUND, INVALID) with the agents that there are.
    """
    scope = region or ("" if name else preferred_region())
    every = agents_here(choose_region(scope) if scope else "")
    found = [each for each in every if not name or each.name == name]
    if len(found) > 1 and not scope:
        found = [each for each in found if each.region == preferred_region()] or found
    if len(found) > 1 and running:
        found = [each for each in found if read_state(each.pid) is not None] or found
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"{each.name} of {each.region}" for each in every) or "none"
    if found:
        raise RequestError(
            f"There are several bridges{f' {name}' if name else ''} on this machine: {there}.",
            hint="Say which: its name, and --region where two regions have one of that name.",
        )
    called = f"bridge {name}" if name else "bridge"
    raise RequestError(
        f"No {called} is configured{f' in {scope}' if scope else ' on this machine'}; there is {there}.",
        code=Code.NOT_FOUND,
        hint="Make one: felix bridge init --to REGION. One that is configured elsewhere is named by --config FILE.",
    )


def config_text(
    config: RegionConfig, name: str, source_addresses: Iterable[str], destinations: dict[str, tuple[str, ...]]
) -> str:
    """A `bridge.yaml` with every key explained. Pure."""
    from bridge.config import LimitsConfig

    limits = {key: str(getattr(LimitsConfig(), key)) for key in LimitsConfig.__struct_fields__}
    return _CONFIG.format(
        name=name,
        mesh=config.mesh,
        source=config.region,
        source_addresses=dumps(list(source_addresses)),
        destinations="".join(
            f"  - region: {region}\n    addresses: {dumps(list(addresses))}\n"
            '    # server_name: ""\n    # bundle: ""\n'
            for region, addresses in destinations.items()
        ),
        **limits,
    )


def write_agent_config(
    folder: RegionFolder,
    config: RegionConfig,
    name: str,
    destinations: Iterable[str],
    addresses: tuple[str, ...] = (),
) -> Path:
    """The agent's configuration, written or rewritten: with the given addresses, else those of profiles and offers.

    Raises RequestError: NOT_FOUND for a region whose address is unknown, ALREADY_EXISTS if the file was edited.
    """
    from bridge.config import load_config

    path = agent_files(folder, name).config
    there = {region: addresses or addresses_of(folder, region) for region in destinations}
    text = config_text(config, name, load_profile(config.region).addresses, there)
    if path.exists():
        _refuse_edited(path, load_config(path), text)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, text.encode(), PUBLIC)
    return path


def _refuse_edited(path: Path, held: BridgeConfig, text: str) -> None:
    """Raises RequestError if the file has more than addresses and destinations, which alone are rewritten."""
    from bridge.config import BridgeConfig
    from policy.documents import decode_document

    new = decode_document(text, BridgeConfig, str(path))
    parts = {"source_addresses": new.source_addresses, "destinations": new.destinations}
    is_plain = not any(each.server_name or each.bundle for each in held.destinations)
    if not is_plain or msgspec.structs.replace(held, **parts) != new:
        raise RequestError(
            f"{path} was edited: it is not written anew.",
            code=Code.ALREADY_EXISTS,
            hint="Change its destinations and addresses there, and start it without --to.",
        )


def start(folder: RegionFolder, name: str, *destinations: str) -> dict[str, Any]:
    """Start an agent in the background; its configuration is rewritten if destinations are named."""
    from region.config import load_config

    if destinations:
        write_agent_config(folder, load_config(folder.config), name, destinations)
    return start_agent(agent_files(folder, name), name)


def start_agent(files: AgentFiles, name: str) -> dict[str, Any]:
    """Start the agent with this configuration apart from this terminal. Raises RequestError, UnavailableError."""
    return start_detached(
        ["--log-level", "info", "bridge", "up", "--config", str(files.config)],
        files.pid,
        files.log,
        f"The bridge {name}",
        files.how_to_stop,
    )


def init(
    to: Annotated[
        list[str], typer.Option("--to", help="A region that records are brought to; may be repeated.")
    ],
    name: Annotated[
        str, typer.Option(help="The bridge's name; `<region>-to-<destination>` if left out.")
    ] = "",
    address: Annotated[
        list[str] | None,
        typer.Option(help="host:port of the one destination, where its offer does not say it."),
    ] = None,
    region: RegionOption = "",
) -> None:
    """Make a bridge: its identity, if there is none, and the agent's configuration with every key explained."""
    from region.bootstrap import issue_identity

    folder, config = folder_of(region)
    name = name or default_bridge(config, to[0])
    path = agent_files(folder, name).config
    if address and len(to) != 1:
        raise RequestError(
            "--address is that of one destination; there are several.", hint="Edit bridge.yaml after."
        )
    if path.exists():
        raise RequestError(
            f"The bridge {name} is configured already: {path}.",
            code=Code.ALREADY_EXISTS,
            hint=f"Edit it, or start it: felix bridge up {name} --region {config.region}.",
        )
    given = tuple(str(parse_address(each)) for each in address or ())
    # The configuration first: where a destination is not known, nothing is issued.
    write_agent_config(folder, config, name, to, given)
    out.print(f"{path} says where {name} leads: {', '.join(to)}")
    if not folder.identity(name).exists():
        identity = issue_identity(folder, config, "bridge", name, now_ms())
        out.print(
            f"{identity.spiffe_id} is valid until {iso(identity.not_after_ms)}, and renews itself while it runs"
        )
        bundle = decode_bundle(folder.bundle.read_bytes()).bundle
        out.print(
            f"The bundle of {config.region} names its audit log now, fingerprint as before: {bundle.fingerprint()}"
        )
        others = [each for each in to if each not in known_regions()]
        if others:
            out.print(f"Send {', '.join(others)} a new offer: felix region offer --region {config.region}")
        else:
            note(
                f"regions that trust {config.region} take its bundle again: felix region trust {folder.bundle}"
            )
    out.print(f"Next: felix bridge up {name} --region {config.region}")


class AgentState(NamedTuple):
    """What is known on this machine of an agent. `not_after_ms`: when its identity ends; None where the file cannot be read.

    `problems`: why its configuration does not hold, or where it looks for a region that has moved.
    """

    name: str
    region: str
    state: Literal["up", "down"]
    pid: int | None
    health: str
    started_ms: int | None
    leads_to: tuple[str, ...]
    identity: str
    not_after_ms: int | None
    config: Path
    problems: tuple[str, ...]


def agents_of(region: str) -> list[AgentState]:
    """Each agent that has a configuration in the region's folder, as it is now."""
    return [_look_at(files) for files in agents_here(region)]


def _look_at(files: AgentFiles) -> AgentState:
    from bridge.config import load_config, paths_of
    from felix.identity_file import load_identity

    running = read_state(files.pid) or {}
    leads: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    name, not_after_ms = "", None
    try:
        config = load_config(files.config)
        leads = tuple(each.region for each in config.destinations)
        problems = tuple(moved(config))
        identity = load_identity(paths_of(config, files.config.parent).identity)
        name, not_after_ms = str(identity.spiffe_id), identity.not_after_ms
    except FelixError as error:
        problems = (*problems, error.sentence)
    return AgentState(
        name=files.name,
        region=files.region,
        state="up" if running else "down",
        pid=running.get("pid"),
        health=running.get("health", ""),
        started_ms=running.get("started_ms"),
        leads_to=leads,
        identity=name,
        not_after_ms=not_after_ms,
        config=files.config,
        problems=problems,
    )


def moved(config: BridgeConfig) -> list[str]:
    """A sentence for each region that the agent looks for where it is not any more, as its profile or offer here says.

    Only ports are compared: another name of a host may well be the same machine.
    """
    folder = RegionFolder.of(config.source)
    told = []
    for region, addresses in (
        (config.source, config.source_addresses),
        *((each.region, each.addresses) for each in config.destinations),
    ):
        try:
            known = addresses_of(folder, region)
        except FelixError:
            continue  # nothing says where else it would be
        if not _all_moved(addresses, known):
            continue
        leads = " ".join(f"--to {each.region}" for each in config.destinations)
        told.append(
            f"{config.name} looks for {region} at {', '.join(addresses)}, and it is at {', '.join(known)} now: "
            f"felix bridge up {config.name} {leads} --region {config.source} writes that into bridge.yaml."
        )
    return told


def _all_moved(configured: Iterable[str], known: Iterable[str]) -> bool:
    there = {parse_address(each) for each in known}
    hosts = {each.host for each in there}
    return all(each not in there and each.host in hosts for each in map(parse_address, configured))
