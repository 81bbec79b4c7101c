"""Who may do what inside a region: verbs on name patterns, bound to identities.

    publish acme/payments/*
    subscribe,bridge-read acme/ops/departures

Invariants: what no right allows is refused; an identity that is not listed, and an empty list, have no right
at all; a session's answer for a stream that does not exist and for one it may not see is the same sentence
(`not_found_or_forbidden`), so names cannot be probed across tenants.

Values only. The broker asks; metadata stores what `Right.__str__` writes; the `felix` command parses what an
operator typed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Self

from felix.errors import Code, RequestError
from felix.names import NamePattern, SpiffeId, StreamName
from policy.documents import nearest

RIGHTS_PER_IDENTITY_MAX: Final = 256
"""A session's rights are looked through on every open; patterns keep real lists far shorter."""
TEXT_CHARS_MAX: Final = 512


class Verb(StrEnum):
    """What can be done to the streams that a pattern names."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    ADMIN = "admin"
    """Create, delete and describe streams."""
    BRIDGE_READ = "bridge-read"
    """Read sealed batches as a bridge agent; a grant is needed besides."""
    OBSERVE = "observe"
    """See what goes on, as `felix mesh` and `felix console` show it: names, figures, links, grants and checkpoints; no record, no key."""
    OPERATE = "operate"
    """Grants, policy, rights, keys and the region's own state."""


_RIGHT: Final = re.compile(r"([a-z, -]+?)\s+(\S+)")


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """One verb on one pattern."""

    verb: Verb
    pattern: NamePattern

    def __str__(self) -> str:
        return f"{self.verb} {self.pattern}"


def parse_rights(text: str) -> tuple[Right, ...]:
    """The rights of one `--allow` text: verbs, separated by commas, and a name pattern.

    Raises RequestError: INVALID for the verbs, NAME_INVALID for the pattern.
    """
    shown = text if len(text) <= TEXT_CHARS_MAX else text[:TEXT_CHARS_MAX] + "…"
    found = _RIGHT.fullmatch(text.strip()) if len(text) <= TEXT_CHARS_MAX else None
    if found is None:
        raise RequestError(
            f"{shown!r} is not a right: expected a verb and a name pattern.",
            hint="Write it as in: publish acme/payments/*",
        )
    pattern = NamePattern(found[2])
    rights: list[Right] = []
    for word in (part.strip() for part in found[1].split(",")):
        try:
            rights.append(Right(Verb(word), pattern))
        except ValueError:
            close = nearest(word, list(Verb))
            raise RequestError(
                f"{word!r} is not a verb{close}" + ("" if close else "."),
                hint=f"Known verbs: {', '.join(Verb)}.",
            ) from None
    return tuple(dict.fromkeys(rights))


def allowed(rights: Iterable[Right], verb: Verb, name: StreamName) -> bool:
    """True where one of a session's rights lets it do `verb` to `name`. No rights, no."""
    return any(right.verb is verb and right.pattern.matches(name) for right in rights)


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights of every identity of a region. A changed table is a new value."""

    by_identity: Mapping[SpiffeId, tuple[Right, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for identity, rights in self.by_identity.items():
            if len(rights) > RIGHTS_PER_IDENTITY_MAX:
                raise RequestError(
                    f"{identity} would have {len(rights)} rights; {RIGHTS_PER_IDENTITY_MAX} are allowed.",
                    hint="Use a pattern such as publish acme/payments/* for several streams.",
                )

    @classmethod
    def decode(cls, table: Mapping[str, Iterable[str]]) -> Self:
        """From identities and right texts, as metadata stores them. Raises RequestError."""
        decoded: dict[SpiffeId, tuple[Right, ...]] = {}
        for identity, texts in table.items():
            rights = dict.fromkeys(right for text in texts for right in parse_rights(text))
            decoded[SpiffeId.parse(identity)] = tuple(rights)
        return cls(MappingProxyType(decoded))

    def encode(self) -> dict[str, list[str]]:
        """Identities and right texts, sorted; `decode` reads them back."""
        return {
            str(identity): sorted(map(str, rights)) for identity, rights in sorted(self.by_identity.items())
        }

    def of(self, identity: SpiffeId) -> tuple[Right, ...]:
        """The rights of one identity; none where it is not listed."""
        return self.by_identity.get(identity, ())

    def allows(self, identity: SpiffeId, verb: Verb, name: StreamName) -> bool:
        """True where a right of `identity` lets it do `verb` to `name`; false for everything else."""
        return allowed(self.of(identity), verb, name)

    def granting(self, identity: SpiffeId, rights: Iterable[Right]) -> Self:
        """A table in which `identity` has these rights besides those it has. Raises RequestError (too many)."""
        together = tuple(dict.fromkeys((*self.of(identity), *rights)))
        return type(self)(MappingProxyType({**self.by_identity, identity: together}))

    def revoking(self, identity: SpiffeId, rights: Iterable[Right] | None = None) -> Self:
        """A table in which `identity` lacks these rights; without `rights`, all of them."""
        gone = set(self.of(identity) if rights is None else rights)
        left = tuple(right for right in self.of(identity) if right not in gone)
        table = {key: value for key, value in self.by_identity.items() if key != identity}
        if left:
            table[identity] = left
        return type(self)(MappingProxyType(table))


def not_found_or_forbidden(verb: Verb, name: StreamName, what: str = "stream") -> RequestError:
    """The one answer for a stream that does not exist and for one that the caller may not use. `what` the caller took it for: a
    stream, a queue or a cache.
    """
    return RequestError(
        f"There is no {what} {name} that this identity may use with {verb}.",
        code=Code.NOT_FOUND_OR_FORBIDDEN,
        hint="Check the name, or ask the region's operator for the right.",
    )
