"""Names: of streams, regions and identities, each validated once, in one type.

Invariants: a value of one of these types is valid; its `str()` parses back to itself. Nothing here does
I/O, and everything that takes a name from outside (CLI, wire, YAML) goes through `parse`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

import xxhash

from felix.errors import Code, RequestError

PART_BYTES_MAX: Final = 63
"""One part of a name: long enough for words, short enough for a file name and a DNS label."""

_PART: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_PATTERN_PART: Final = re.compile(r"\*|[a-z0-9][a-z0-9._-]{0,62}\*?")

RESERVED_TENANT: Final = "felix"
"""Its streams are the system's own: no client creates, reads, lists or is granted one, and no grant names one."""
SESSION_KINDS: Final = ("broker", "client", "bridge", "operator")
"""Kinds of identities that may open a session."""
IDENTITY_KINDS: Final = (*SESSION_KINDS, "approver")
"""An approver signs approvals of grants (policy.approval), and can do nothing else."""


def _refuse(what: str, text: str, expected: str) -> RequestError:
    shown = text if len(text) <= 200 else text[:200] + "…"
    return RequestError(f"{shown!r} is not a {what}: {expected}.", code=Code.NAME_INVALID)


@dataclass(frozen=True, slots=True, order=True)
class StreamName:
    """`tenant/namespace/name`, each part `[a-z0-9][a-z0-9._-]{0,62}`."""

    tenant: str
    namespace: str
    name: str

    def __post_init__(self) -> None:
        for part in (self.tenant, self.namespace, self.name):
            if not _PART.fullmatch(part):
                raise _refuse(
                    "name",
                    f"{self.tenant}/{self.namespace}/{self.name}",
                    "expected tenant/namespace/name, each part of 1 to 63 characters a-z 0-9 . _ - "
                    "that starts with a letter or digit",
                )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises RequestError(NAME_INVALID) with what was expected."""
        parts = text.split("/")
        if len(parts) != 3:
            raise _refuse(
                "name", text, "expected three parts, tenant/namespace/name, as in acme/payments/orders"
            )
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.tenant}/{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, order=True)
class NamePattern:
    """Three parts like a stream name, where a part may be `*` or end in `*`: `acme/payments/*`, `acme/*/orders-*`."""

    text: str

    def __post_init__(self) -> None:
        parts = self.text.split("/")
        if len(parts) != 3 or not all(_PATTERN_PART.fullmatch(part) for part in parts):
            raise _refuse(
                "name pattern", self.text, "expected tenant/namespace/name, where a part may be * or end in *"
            )

    @property
    def is_exact(self) -> bool:
        """True where the pattern names exactly one stream."""
        return "*" not in self.text

    def matches(self, name: StreamName) -> bool:
        """True where every part of `name` fits its part of the pattern."""
        for pattern, part in zip(self.text.split("/"), (name.tenant, name.namespace, name.name), strict=True):
            if pattern.endswith("*"):
                if not part.startswith(pattern[:-1]):
                    return False
            elif pattern != part:
                return False
        return True

    def __str__(self) -> str:
        return self.text


def parse_region(text: str) -> str:
    """A region's or mesh's name: a DNS label. Raises RequestError(NAME_INVALID)."""
    if not _LABEL.fullmatch(text):
        raise _refuse(
            "region or mesh name",
            text,
            "expected a DNS label: a-z 0-9 and -, 1 to 63 characters, as in us-east",
        )
    return text


def parse_subscription(text: str) -> str:
    """A durable subscription's name: as one part of a stream's name. Raises RequestError(NAME_INVALID)."""
    if not _PART.fullmatch(text):
        raise _refuse(
            "subscription name",
            text,
            "expected 1 to 63 characters a-z 0-9 . _ - that start with a letter or digit, as in billing",
        )
    return text


def trust_domain(region: str, mesh: str) -> str:
    """The SPIFFE trust domain of a region: `<region>.<mesh>`."""
    return f"{parse_region(region)}.{parse_region(mesh)}"


@dataclass(frozen=True, slots=True, order=True)
class SpiffeId:
    """`spiffe://<region>.<mesh>/<kind>/<name>`; kind is broker, client, bridge, operator or approver.

    Source: SPIFFE ID specification, section 2 (trust domain, path), narrowed to two path segments.
    """

    region: str
    mesh: str
    kind: str
    name: str

    def __post_init__(self) -> None:
        parse_region(self.region)
        parse_region(self.mesh)
        if self.kind not in IDENTITY_KINDS or not _PART.fullmatch(self.name):
            raise _refuse(
                "identity",
                f"spiffe://{self.region}.{self.mesh}/{self.kind}/{self.name}",
                f"expected spiffe://<region>.<mesh>/<kind>/<name> with kind one of {', '.join(IDENTITY_KINDS)}",
            )

    @property
    def trust_domain(self) -> str:
        """`<region>.<mesh>`."""
        return f"{self.region}.{self.mesh}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises RequestError(NAME_INVALID) with what was expected."""
        expected = "expected spiffe://<region>.<mesh>/<kind>/<name>"
        if not text.startswith("spiffe://"):
            raise _refuse("identity", text, expected)
        parts = text.removeprefix("spiffe://").split("/")
        domain = parts[0].split(".")
        if len(parts) != 3 or len(domain) != 2:
            raise _refuse("identity", text, expected)
        return cls(domain[0], domain[1], parts[1], parts[2])

    def __str__(self) -> str:
        return f"spiffe://{self.region}.{self.mesh}/{self.kind}/{self.name}"


def shard_for_key(key: bytes, shards: int) -> int:
    """The shard of a record with this key: XXH3-64 of the key, seed 0, modulo the number of shards.

    The hash is part of the protocol (docs/wire.md): clients in any language must agree on it.
    """
    assert shards > 0
    return int(xxhash.xxh3_64_intdigest(key) % shards)
