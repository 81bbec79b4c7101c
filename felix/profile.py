"""Profiles: how a client reaches one region, whom it trusts there, and as whom it comes.

A profile is a file that `felix region init` writes, `<home>/<region>/profile.json`, or a `Profile` made in code.
Home is `FELIX_HOME`, else `~/.felix`. Relative paths in the file are relative to it::

    {"region": "us-east", "mesh": "acme", "addresses": ["127.0.0.1:7443"], "server_name": "localhost",
     "authority": "bundle.json", "identity": "identities/operator"}

`authority` is the region's bundle or a PEM file with the root certificate; `identity` is a path with or without its
ending (`.pem`, and next to it `.key` if the key is in a separate file).

Invariants: a `Profile` holds at least one address that parses, and a bundle that is of its own region and mesh.
`load_profile` and `load_credentials` block on the disk; all else is pure.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from felix.address import Address
from felix.errors import Code, RequestError
from felix.identity import Identity, check_root
from felix.identity_file import load_identity
from felix.names import parse_region

HOME_VARIABLE: Final = "FELIX_HOME"
PORT: Final = 7443
"""The port of an address that names none (docs/wire.md)."""
ADDRESSES_MAX: Final = 64
_FILE_BYTES_MAX: Final = 1 << 20


def parse_address(text: str) -> Address:
    """`host`, `host:port`, `[v6]:port`. Raises RequestError(CONFIG_INVALID) with what was expected."""
    host, port = text.strip(), ""
    if host.startswith("["):
        host, _, rest = host[1:].partition("]")
        port = rest.removeprefix(":") if not rest or rest.startswith(":") else "?"
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
        port = port or "?"
    number = int(port) if port.isascii() and port.isdigit() else 0 if port else PORT
    if not host or not 0 < number < 1 << 16:
        raise RequestError(
            f"{text!r} is not an address: expected host:port, as in 127.0.0.1:{PORT} or [::1]:{PORT}.",
            code=Code.CONFIG_INVALID,
        )
    return Address(host, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How to reach a region.

    - `addresses`: brokers as `host:port`, tried in turn;
    - `server_name`: the DNS name in the brokers' certificates; empty: `<region>.<mesh>`;
    - `authority`: the region's root certificate as PEM, or the path of a bundle or PEM file;
    - `identity`: an `Identity`, or the path of one (read again at each connect, so that a renewed one is taken);
    - `engine`: `qh3` or `aioquic`; empty: `FELIX_QUIC_ENGINE`, else the native one.
    """

    region: str
    mesh: str
    addresses: tuple[str, ...]
    authority: bytes | Path = field(repr=False)
    identity: Identity | Path
    server_name: str = ""
    engine: str = ""

    def __post_init__(self) -> None:
        """Raises RequestError: NAME_INVALID, CONFIG_INVALID."""
        parse_region(self.region)
        parse_region(self.mesh)
        if not 0 < len(self.addresses) <= ADDRESSES_MAX:
            raise RequestError(
                f"A profile of {self.region} needs 1 to {ADDRESSES_MAX} addresses, not {len(self.addresses)}.",
                code=Code.CONFIG_INVALID,
            )
        for address in self.addresses:
            parse_address(address)

    @property
    def tls_name(self) -> str:
        """The name that TLS verifies."""
        return self.server_name or f"{self.region}.{self.mesh}"

    def parsed_addresses(self) -> list[Address]:
        """The addresses in the order given."""
        return [parse_address(address) for address in self.addresses]


class Credentials(NamedTuple):
    """The contents of a profile's files: the region's root as PEM, and the client's identity."""

    root_pem: bytes
    identity: Identity


class _ProfileFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    region: str
    mesh: str
    addresses: list[str]
    authority: str = "bundle.json"
    identity: str = "identities/operator"
    server_name: str = ""
    engine: str = ""


class _Bundle(msgspec.Struct, frozen=True):
    root_pem: str


class _SignedBundle(msgspec.Struct, frozen=True):
    """As much of a region's bundle.json (keys.bundle) as a client needs: the root, which says whose it is."""

    bundle: _Bundle


def felix_home() -> Path:
    """`FELIX_HOME`, else `~/.felix`."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".felix").expanduser()


def _read(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise RequestError(
            f"{what} cannot be read from {path}: {error.strerror or error}.",
            code=Code.NOT_FOUND if isinstance(error, FileNotFoundError) else Code.CONFIG_INVALID,
            hint="Check the path in the profile, or make the region's folder anew with `felix region init`.",
        ) from error
    if len(data) > _FILE_BYTES_MAX:
        raise RequestError(f"{path} is larger than {what} can be.", code=Code.CONFIG_INVALID)
    return data


def load_profile(region: str, *, identity: str = "", home: Path | None = None) -> Profile:
    """The profile that `felix region init` wrote for a region. Blocks on the disk.

    `identity` is the name of one in the region's folder `identities/` (or a path with a `/`); empty: the profile's own.
    Raises RequestError: NAME_INVALID, NOT_FOUND (no such region, no such identity), CONFIG_INVALID.
    """
    parse_region(region)
    root = felix_home() if home is None else home
    path = root / region / "profile.json"
    if not path.is_file():
        known = sorted(entry.parent.name for entry in root.glob("*/profile.json"))
        raise RequestError(
            f"There is no region {region!r} in {root}"
            + (f"; there are {', '.join(known)}." if known else "."),
            code=Code.NOT_FOUND,
            hint=f"Make one with `felix region init {region} --mesh NAME`, or set {HOME_VARIABLE} to where it is.",
        )
    try:
        found = msgspec.json.decode(_read(path, "The profile"), type=_ProfileFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"The profile {path} is not valid: {error}.", code=Code.CONFIG_INVALID) from error
    if found.region != region:
        raise RequestError(
            f"The profile {path} is of region {found.region!r}, not {region!r}.", code=Code.CONFIG_INVALID
        )
    folder = path.parent
    if not identity:
        who = folder / Path(found.identity).expanduser()
    elif "/" in identity:
        who = Path(identity).expanduser()
    else:
        who = folder / "identities" / identity
    return Profile(
        region=found.region,
        mesh=found.mesh,
        addresses=tuple(found.addresses),
        authority=folder / Path(found.authority).expanduser(),
        identity=who,
        server_name=found.server_name,
        engine=found.engine,
    )


def load_credentials(profile: Profile) -> Credentials:
    """The root and the identity that a profile names, read now and checked against it. Blocks on the disk.

    Raises RequestError: NOT_FOUND, CONFIG_INVALID, INVALID (a root of another region), IDENTITY_REFUSED.
    """
    return Credentials(_load_root(profile), _load_identity(profile))


def _load_root(profile: Profile) -> bytes:
    if isinstance(profile.authority, bytes):
        root = profile.authority
    else:
        root = _read(profile.authority, f"The authority of {profile.region}")
        if not root.lstrip().startswith(b"-----BEGIN"):
            try:
                signed = msgspec.json.decode(root, type=_SignedBundle)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise RequestError(
                    f"{profile.authority} is neither a bundle nor a PEM certificate: {error}.",
                    code=Code.CONFIG_INVALID,
                    hint="Take the region's bundle.json again from somebody who runs it.",
                ) from error
            root = signed.bundle.root_pem.encode()
    check_root(profile.region, profile.mesh, root)
    return root


def _load_identity(profile: Profile) -> Identity:
    if isinstance(profile.identity, Identity):
        return profile.identity
    base = profile.identity
    certificate, key = identity_files(base)
    if not certificate.is_file():
        name = base.name.removesuffix(".pem")
        known = sorted(entry.stem for entry in certificate.parent.glob("*.pem") if ".audit" not in entry.name)
        kind = " --kind operator" if name == "operator" else ""
        raise RequestError(
            f"There is no identity {name!r} of region {profile.region} in {certificate.parent}"
            + (f"; there are {', '.join(known)}." if known else "."),
            code=Code.NOT_FOUND,
            hint=f"Have one issued with `felix identity issue {name}{kind} --region {profile.region}`.",
        )
    return load_identity(certificate, key)


def identity_files(base: Path) -> tuple[Path, Path | None]:
    """The file of the certificate chain, and that of the key where it lies in one of its own. Looks at the disk."""
    certificate = base if base.suffix == ".pem" else base.with_name(base.name + ".pem")
    key = certificate.with_name(certificate.name.removesuffix(".pem") + ".key")
    return certificate, key if key.is_file() else None
