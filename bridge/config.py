"""The agent's configuration, `bridge.yaml`: decoded into typed values (policy.documents says where a mistake is).

    name: us-to-eu
    mesh: acme
    source: us-east
    source_addresses: [127.0.0.1:7443]
    destinations:
      - region: eu-west
        addresses: [127.0.0.1:7444]
    health: 127.0.0.1:8090

Every option is read by something; what is left out has the default that stands here. `home` is the state folder of the
source region (relative paths are relative to the file's folder); the other paths are relative to `home`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from audit.witness_config import QuorumConfig, Witnesses
from bridge.plan import LINKS_MAX
from felix.address import Address
from felix.errors import Code, RequestError
from felix.names import parse_region
from felix.profile import parse_address
from felix.storage.begun import SUFFIX
from felix.telemetry import TracingConfig
from felix.transport.port import EngineName
from policy.documents import Parsed, decode_document
from policy.quantity import Size

DESTINATIONS_MAX: Final = 16
"""Regions that one agent serves, each with a session of its own."""


def _address(text: str) -> str:
    parse_address(text)
    return text


Words = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Label = Annotated[str, Parsed(parse_region)]
Reach = Annotated[str, Parsed(_address)]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the configuration's parts: an unknown key is a mistake."""


class DestinationConfig(Part, frozen=True, kw_only=True):
    """A region that records are brought to. `bundle`: its public bundle; empty: `trusted/<region>.json`."""

    region: Label
    addresses: Annotated[tuple[Reach, ...], msgspec.Meta(min_length=1, max_length=64)]
    server_name: str = ""
    bundle: str = ""


class LimitsConfig(Part, frozen=True):
    """Bounds of one agent; docs/bridges.md says where each is enforced."""

    links: Annotated[int, msgspec.Meta(ge=1, le=LINKS_MAX)] = LINKS_MAX
    read_ahead: Size = Size(4 << 20)
    """Sealed bytes of one link that are read and not dealt with: its credit at the source."""
    envelopes: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 24
    """Envelopes of one link on the way; the destination may allow fewer."""
    on_the_way: Size = Size(8 << 20)
    """The same in bytes."""

    def __post_init__(self) -> None:
        if self.read_ahead < 2 << 20:
            raise RequestError("read_ahead must be at least 2MiB: two of the largest batches.")


class BridgeConfig(Part, frozen=True, kw_only=True):
    """One agent: one identity, one egress log, one source region, and its destinations."""

    name: Label
    source: Label
    mesh: Label
    source_addresses: Annotated[tuple[Reach, ...], msgspec.Meta(min_length=1, max_length=64)]
    source_server_name: str = ""
    destinations: Annotated[
        tuple[DestinationConfig, ...], msgspec.Meta(min_length=1, max_length=DESTINATIONS_MAX)
    ]
    home: Words = "."
    bundle: Words = "bundle.json"
    identity: str = ""
    """the certificate chain and key; empty: `identities/<name>.pem`"""
    egress_key: str = ""
    """signs the egress log's checkpoints; empty: `identities/<name>.audit.pem`"""
    egress_ml_dsa_key: str = ""
    """signs them beside it, with ML-DSA-44; empty: `identities/<name>.audit.mldsa.pem`, if that is there"""
    handoff_key: str = ""
    """what keys are sealed to; empty: `identities/<name>.handoff.key`"""
    egress: str = ""
    """the egress log's folder; empty: `bridges/<name>/egress`"""
    health: Address | None = None
    engine: EngineName = ""
    limits: LimitsConfig = LimitsConfig()
    tracing: TracingConfig = TracingConfig()
    witnesses: Witnesses = ()
    """outside witnesses that the egress log is submitted to (docs/witnesses.md)"""
    require_quorum: QuorumConfig | None = None
    """nothing crosses without it"""

    def __post_init__(self) -> None:
        regions = [destination.region for destination in self.destinations]
        if self.source in regions or len(set(regions)) != len(regions):
            raise RequestError("Destinations are regions other than the source, each named once.")


class BridgePaths(NamedTuple):
    """Where an agent's files lie."""

    bundle: Path
    identity: Path
    egress_key: Path
    egress_ml_dsa_key: Path
    handoff_key: Path
    egress: Path
    egress_begun: Path
    """remembers that folder"""
    bundle_held: Path
    """the bundle of its own region that the agent went by last"""
    trusted: dict[str, Path]


def paths_of(config: BridgeConfig, base: Path) -> BridgePaths:
    """`base`: the folder of the configuration file."""
    home = base / config.home
    name = config.name
    return BridgePaths(
        home / config.bundle,
        home / (config.identity or f"identities/{name}.pem"),
        home / (config.egress_key or f"identities/{name}.audit.pem"),
        home / (config.egress_ml_dsa_key or f"identities/{name}.audit.mldsa.pem"),
        home / (config.handoff_key or f"identities/{name}.handoff.key"),
        home / (config.egress or f"bridges/{name}/egress"),
        home / f"bridges/{name}{SUFFIX}",
        home / f"bridges/{name}.bundle.json",
        {each.region: home / (each.bundle or f"trusted/{each.region}.json") for each in config.destinations},
    )


def load_config(path: Path) -> BridgeConfig:
    """Read and check an agent's configuration. Raises RequestError(CONFIG_INVALID) with file and line. Blocks."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"The bridge's configuration {path} cannot be read: {error}.", code=Code.CONFIG_INVALID
        ) from error
    return decode_document(text, BridgeConfig, str(path))
