"""Policy files of C2SP tlog-policy: which logs, which witnesses, and how many of them must have cosigned. Pure.

    log <vkey> [<url>]
    witness <name> <vkey> [<url>]
    group <name> all|any|<k> <name>...
    quorum <name>|none

Source: https://c2sp.org/tlog-policy. Names are octets: they are compared as such, whatever a reader takes them for.
Invariants of a `WitnessPolicy`: each name is defined once and before its use, and is a member at most once, so that a
witness counts once; every threshold can be reached; no two logs, and no two witnesses, have one public key. Nothing here
verifies a signature: `is_met` is asked about keys whose cosignatures were verified. Callers: audit.trust, bridge, cli.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from audit.note import Algorithm, VerifierKey
from felix.errors import Code, RequestError

POLICY_BYTES_MAX: Final = 1 << 20
"""64 ML-DSA-44 keys take some 120 kB; the rest is for comments."""
ENTRIES_MAX: Final = 256
"""Logs, witnesses and groups, of each; the specification asks for 32."""
NONE: Final = "none"
_QUORUM: Final = "quorum"
"""What the outermost group of a policy that is written here is called."""
_LOG_TYPES: Final = frozenset({Algorithm.ED25519, Algorithm.ML_DSA_44})
_WITNESS_TYPES: Final = frozenset({Algorithm.COSIGNATURE, Algorithm.ML_DSA_44})


class PolicyError(RequestError):
    """A policy file that cannot be taken; the sentence names the line."""

    default_code = Code.CONFIG_INVALID


class PolicyLog(NamedTuple):
    """A log whose checkpoints are accepted; its key's name is the log's origin."""

    key: VerifierKey
    url: str = ""


class PolicyWitness(NamedTuple):
    """A witness, by the name that groups and the quorum call it."""

    name: str
    key: VerifierKey
    url: str = ""


class Group(NamedTuple):
    """Witnesses a checkpoint where at least `threshold` of the members do."""

    name: str
    threshold: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WitnessPolicy:
    """A policy; make it with `parse`."""

    logs: tuple[PolicyLog, ...]
    witnesses: tuple[PolicyWitness, ...]
    groups: tuple[Group, ...]
    """each after the groups that are its members"""
    quorum: str
    """a witness, a group, or `none`"""

    @classmethod
    def parse(cls, data: bytes) -> WitnessPolicy:
        """Read a policy file. Raises PolicyError, with the line and what was expected."""
        if len(data) > POLICY_BYTES_MAX:
            raise PolicyError(f"A policy of {len(data)} bytes; {POLICY_BYTES_MAX} are allowed.")
        return _Reader().read(data)

    @property
    def log_keys(self) -> tuple[VerifierKey, ...]:
        return tuple(log.key for log in self.logs)

    @property
    def witness_keys(self) -> tuple[VerifierKey, ...]:
        return tuple(witness.key for witness in self.witnesses)

    def is_met(self, cosigned: Iterable[VerifierKey]) -> bool:
        """True where the witnesses of these keys, whose cosignatures were verified, are a quorum."""
        return self.quorum == NONE or self.quorum in self._witnessed(cosigned)

    def missing(self, cosigned: Iterable[VerifierKey]) -> str:
        """Why there is no quorum, for a person; empty where there is one."""
        keys = tuple(cosigned)
        if self.is_met(keys):
            return ""
        have = self._witnessed(keys)
        did = [shown(witness.name) for witness in self.witnesses if witness.name in have]
        group = next((each for each in self.groups if each.name == self.quorum), None)
        wanted = f"the witness {shown(self.quorum)}"
        if group is not None:
            members = ", ".join(map(shown, group.members))
            wanted = f"{group.threshold} of {members} (the group {shown(group.name)})"
        return f"the policy asks for {wanted}; {', '.join(did) or 'none of its witnesses'} cosigned"

    def _witnessed(self, cosigned: Iterable[VerifierKey]) -> set[str]:
        keys = set(cosigned)
        have = {witness.name for witness in self.witnesses if witness.key in keys}
        for group in self.groups:
            if sum(member in have for member in group.members) >= group.threshold:
                have.add(group.name)
        return have


def shown(name: str) -> str:
    """A name for people: octets that are not UTF-8 escaped."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def format_policy(
    logs: Iterable[VerifierKey], witnesses: Mapping[str, Iterable[VerifierKey]], *, post_quantum: bool = False
) -> str:
    """A policy file of these logs, and witnesses by who they are: one witness, by any one of its keys, is a quorum. With
    `post_quantum` only ML-DSA-44 keys stand in it, so whoever verifies by it demands them.

    `WitnessPolicy.parse` reads it: of several logs, or several witnesses, with one public key the first has a line, and a comment says
    so of the others; names that would stand twice are numbered.
    """
    named, lines = _each_once(logs, {}, post_quantum)
    for key in named:
        if key.to_size is not None:
            lines.append(
                f"# ended at {key.to_size} leaves, which a policy cannot say: for verifiers, and not for a witness"
            )
        lines.append(f"log {key}")
    held, taken, groups = dict[bytes, VerifierKey](), {NONE, _QUORUM}, list[str]()
    # First those of the parties, by which people know them.
    names = {party: _free_name(party, taken) for party in witnesses}
    for party, keys in witnesses.items():
        named, comments = _each_once(keys, held, post_quantum)
        members = [
            _free_name(f"{party}-{key.algorithm.name.lower().replace('_', '-')}", taken) for key in named
        ]
        lines += [*comments, *(f"witness {name} {key}" for name, key in zip(members, named, strict=True))]
        if members:
            lines.append(f"group {names[party]} any {' '.join(members)}")
            groups.append(names[party])
    lines.append(f"group {_QUORUM} any {' '.join(groups)}\nquorum {_QUORUM}" if groups else f"quorum {NONE}")
    return "\n".join(lines) + "\n"


def _each_once(
    keys: Iterable[VerifierKey], held: dict[bytes, VerifierKey], post_quantum: bool
) -> tuple[list[VerifierKey], list[str]]:
    """Those to be named, none of whose public keys is in `held`, which takes them in; and comments on the others."""
    named, comments = list[VerifierKey](), list[str]()
    for key in keys:
        if post_quantum and not key.algorithm.is_post_quantum:
            continue
        holder = held.setdefault(key.public, key)
        if holder is key:
            named.append(key)
        else:
            comments.append(f"# left out: {key.name} has the public key of {holder.name}")
    return named, comments


def _free_name(name: str, taken: set[str]) -> str:
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    taken.add(found)
    return found


class _Reader:
    """Line by line; what is known so far."""

    def __init__(self) -> None:
        self._logs: list[PolicyLog] = []
        self._witnesses: list[PolicyWitness] = []
        self._groups: list[Group] = []
        self._names: set[str] = set()
        self._used: set[str] = set()
        self._quorum: str | None = None

    def read(self, data: bytes) -> WitnessPolicy:
        for number, line in enumerate(data.split(b"\n"), 1):
            strange = next(
                (octet for octet in line if (octet < 0x20 and octet != 0x09) or octet == 0x7F), None
            )
            if strange is not None:
                raise PolicyError(f"Line {number} of the policy has the control character 0x{strange:02x}.")
            # Octets, one to one: a name that is not UTF-8 stays what it is.
            words = [
                word for word in line.decode("utf-8", "surrogateescape").replace("\t", " ").split(" ") if word
            ]
            if not words or words[0].startswith("#"):
                continue
            try:
                self._line(words[0], words[1:])
            except RequestError as error:
                raise PolicyError(
                    f"Line {number} of the policy: {error.sentence}", hint=error.hint
                ) from error
        if self._quorum is None:
            raise PolicyError("The policy has no quorum line.", hint="`quorum none` asks for no cosignature.")
        return WitnessPolicy(tuple(self._logs), tuple(self._witnesses), tuple(self._groups), self._quorum)

    def _line(self, word: str, rest: list[str]) -> None:
        if word == "log" and len(rest) in (1, 2):
            self._log(rest)
        elif word == "witness" and len(rest) in (2, 3):
            self._witness(rest)
        elif word == "group" and len(rest) >= 3:
            self._group(rest[0], rest[1], rest[2:])
        elif word == "quorum" and len(rest) == 1:
            self._set_quorum(rest[0])
        else:
            raise RequestError(
                f"{shown(' '.join([word, *rest]))[:120]!r} is none of its lines.",
                hint="`log VKEY [URL]`, `witness NAME VKEY [URL]`, `group NAME all|any|K NAME...`, `quorum NAME`.",
            )

    def _log(self, rest: list[str]) -> None:
        key = _key(rest[0], _LOG_TYPES, "a log")
        if any(log.key.public == key.public for log in self._logs):
            raise RequestError(f"the log {key.name} has the public key of another log.")
        self._logs.append(PolicyLog(key, *rest[1:]))
        _check_room(self._logs, "logs")

    def _witness(self, rest: list[str]) -> None:
        key = _key(rest[1], _WITNESS_TYPES, "a witness")
        if any(witness.key.public == key.public for witness in self._witnesses):
            raise RequestError(f"the witness {shown(rest[0])} has the public key of another witness.")
        self._define(rest[0])
        self._witnesses.append(PolicyWitness(rest[0], key, *rest[2:]))
        _check_room(self._witnesses, "witnesses")

    def _group(self, name: str, rule: str, members: list[str]) -> None:
        for member in members:
            if member == NONE:
                raise RequestError("`none` cannot be a member.")
            if member not in self._names:
                raise RequestError(f"{shown(member)} is not defined on a line before.")
            if member in self._used:
                raise RequestError(f"{shown(member)} is a member already; each name can be one once.")
            self._used.add(member)
        self._define(name)
        self._groups.append(Group(name, _threshold(rule, len(members)), tuple(members)))
        _check_room(self._groups, "groups")

    def _set_quorum(self, name: str) -> None:
        if self._quorum is not None:
            raise RequestError("there is a quorum line already.")
        if name != NONE and name not in self._names:
            raise RequestError(f"the quorum {shown(name)} is not defined on a line before.")
        self._quorum = name

    def _define(self, name: str) -> None:
        if name == NONE:
            raise RequestError("`none` is the name of no witness and no group.")
        if name in self._names:
            raise RequestError(f"{shown(name)} is defined already.")
        self._names.add(name)


def _threshold(rule: str, members: int) -> int:
    if rule in ("all", "any"):
        return members if rule == "all" else 1
    if (
        not rule.isascii()
        or not rule.isdecimal()
        or rule.startswith("0")
        or len(rule) > 3
        or int(rule) > members
    ):
        raise RequestError(f"{shown(rule)[:40]!r} is not `all`, `any` or a number from 1 to {members}.")
    return int(rule)


def _key(text: str, types: frozenset[Algorithm], what: str) -> VerifierKey:
    if not text.isascii() and any("\udc80" <= letter <= "\udcff" for letter in text):
        raise RequestError("a verifier key's name is valid UTF-8.")
    key = VerifierKey.parse(text)
    if key.algorithm not in types:
        raise RequestError(f"{key.name} has a key of type 0x{key.algorithm:02x}, which is not one of {what}.")
    return key


def _check_room(held: list[PolicyLog] | list[PolicyWitness] | list[Group], what: str) -> None:
    if len(held) > ENTRIES_MAX:
        raise RequestError(f"there are more than {ENTRIES_MAX} {what}.")
