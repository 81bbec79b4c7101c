"""What a region's own audit log says of its policy and receipt keys: which ones it gave up, and which ones it has since, by KEY leaves. Pure.

A folder of before a change (`bundle.json`, `secrets/`) that is put back beside a log that goes on would take up the former keys again, and with them whoever
stole them. A key that the log says was given up is none that a broker begins with, whenever its bundle was signed; nor does one begin whose bundle skips the key that
the log names last, for nobody would know any more where that one ended. Whoever has lost the new keys changes them again,
with the bundle that names them: the next ones are in no leaf yet, and the lost ones are given up with that.

The command writes these leaves where one process writes the log (region.trust.signing_keys); of a log of which several brokers have copies, the one that writes it does
(region.governance.changed_keys). Brokers without a copy of the log hear of it by a note (region.trust.signing_key_note).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final, Literal, NamedTuple

import msgspec

from audit.leaf import KEY_ID_BYTES, Header, Kind, Leaf, Side
from keys.bundle import RegionBundle

Role = Literal["policy", "receipt"]
Change = Literal["ended", "changed"]
ROLES: Final[tuple[Role, ...]] = ("policy", "receipt")
ACTIONS: Final[Mapping[str, tuple[Role, Change]]] = {
    f"{role}-key-{change}": (role, change) for role in ROLES for change in ("ended", "changed")
}
ENDED_MAX: Final = 1_024
"""Keys of a role that are known as given up; of more, the earliest are forgotten. A bundle names those of 16 changes."""
STALE_HINT: Final = (
    "Put bundle.json and secrets/ of after the change into the folder (and the file lost-bundle, where there is one), and start the broker again. Where the change was cut off, run felix region change-signing-keys again. "
    "Where secrets/ is lost, take that bundle.json from a region that trusts this one, run felix region change-signing-keys, have the other regions compare the new "
    "bundle, and sign again what stands. Where nobody has that file: felix region change-signing-keys --lost-bundle."
)

NOTE_HINT: Final = (
    f"{STALE_HINT} Where nobody changed these keys, whoever wrote the note has the key of the audit log, from some broker's secrets/, and could write the store: stop the brokers, "
    "and give the log other keys (felix region change-log-keys): no note counts then that the one before has signed. Other signing keys alone help until he writes a note that names those. See "
    "docs/runbooks/leaked-log-key.md."
)


class LoggedKey(msgspec.Struct, frozen=True):
    """Of one role: the key that the last leaf of a change names (16 bytes of its SHA-256; none before the first change), since when (Unix time), and those that were
    given up, the earliest first."""

    key_id: bytes = b""
    time_ms: int = 0
    ended: tuple[bytes, ...] = ()

    def after(self, change: Change, key_id: bytes, time_ms: int) -> LoggedKey:
        """With the next leaf."""
        given_up = key_id if change == "ended" else self.key_id
        ended = self.ended
        if given_up and given_up not in ended and (change == "ended" or given_up != key_id):
            ended = (*ended, given_up)[-ENDED_MAX:]
        return (
            LoggedKey(self.key_id, time_ms, ended) if change == "ended" else LoggedKey(key_id, time_ms, ended)
        )


LoggedKeys = Mapping[Role, LoggedKey]
NEVER_CHANGED: Final = LoggedKey()


class KeyLeaf(NamedTuple):
    """What a leaf is to say."""

    role: Role
    change: Change
    key_id: bytes

    @property
    def action(self) -> str:
        return f"{self.role}-key-{self.change}"

    def leaf(self, own: str, now_ms: int, actor: str = "") -> Leaf:
        said = "was given up" if self.change == "ended" else "is another one from here on"
        return key_leaf(own, now_ms, actor, self.action, self.key_id, f"The region's {self.role} key {said}.")


def key_leaf(own: str, now_ms: int, actor: str, action: str, key_id: bytes, sentence: str) -> Leaf:
    """The KEY leaf by which a region's own log says something of a key of its own."""
    return Leaf(
        Header(
            kind=Kind.KEY,
            side=Side.INGRESS,
            time_ms=now_ms,
            source_region=own,
            destination_region=own,
            actor=actor,
            action=action,
            key_id=key_id,
            sentence=sentence,
        )
    )


def key_id_of(public: bytes) -> bytes:
    """What a KEY leaf calls a public key."""
    return sha256(public).digest()[:KEY_ID_BYTES]


def take(known: dict[Role, LoggedKey], action: str, key_id: bytes, time_ms: int) -> None:
    """Take in a KEY leaf; those of other actions are left aside."""
    if action in ACTIONS:
        role, change = ACTIONS[action]
        known[role] = known.get(role, NEVER_CHANGED).after(change, key_id, time_ms)


def given_up(own: RegionBundle, logged: LoggedKeys, *, is_note: bool = False) -> str:
    """A sentence where the bundle's key is one that the region gave up, by its log or by a note of it; else nothing. Of an earlier state of the log it says no more than of a later one."""
    for role in ROLES:
        last = logged.get(role, NEVER_CHANGED)
        if any(key_id_of(public) in last.ended for public in keys_of_now(own, role)):
            return (
                f"{_speaker(own, is_note=is_note)} says that the region gave up the {role} key that bundle.json in this folder names: it was changed at {_changed(last)}, "
                "and the file is of before that."
            )
    return ""


def stale_key(
    own: RegionBundle, logged: LoggedKeys, instead: Collection[bytes] = (), *, is_note: bool = False
) -> str:
    """A sentence where the bundle's key is one that the region gave up, by its log or by a note of it, or the bundle skips the key that the log names last: it was made from one of before
    that; else nothing. `instead`: keys that take the place of whichever one the log names last, since its bundle is lost (`--lost-bundle`)."""
    if sentence := given_up(own, logged, is_note=is_note):
        return sentence
    for role in ROLES:
        last = logged.get(role, NEVER_CHANGED)
        now = [key_id_of(public) for public in keys_of_now(own, role)]
        known = {*now, *map(key_id_of, former_keys(own, role))}
        if last.key_id and last.key_id not in known and set(now).isdisjoint(instead):
            return (
                f"{_speaker(own, is_note=is_note)} names a {role} key, since {_changed(last)}, that bundle.json in this folder has neither as a key of now nor as a former one: "
                "the file was made from one of before that change."
            )
    return ""


def unlogged(own: RegionBundle, logged: LoggedKeys, instead: Collection[bytes] = ()) -> list[KeyLeaf]:
    """What the log is to say of this bundle's keys, and does not yet: first what was given up. `instead`: as `stale_key`."""
    if stale_key(own, logged, instead):
        return []
    found = []
    for role in ROLES:
        last, former, now = logged.get(role, NEVER_CHANGED), former_keys(own, role), keys_of_now(own, role)
        found += [
            KeyLeaf(role, "ended", key_id) for key_id in map(key_id_of, former) if key_id not in last.ended
        ]
        if (former or last.key_id) and last.key_id not in map(key_id_of, now):
            found.append(KeyLeaf(role, "changed", key_id_of(now[0])))
    return found


def joined(log: LoggedKeys, noted: LoggedKeys) -> dict[Role, LoggedKey]:
    """What a log says, and besides what a note says that was given up: a log that was put back from a copy may have lost leaves."""
    found = dict[Role, LoggedKey]()
    for role in ROLES:
        of_log, of_note = log.get(role), noted.get(role, NEVER_CHANGED)
        latest = of_note if of_log is None else of_log
        ended = [key_id for key_id in of_note.ended if key_id not in latest.ended]
        if latest is not NEVER_CHANGED:
            found[role] = LoggedKey(latest.key_id, latest.time_ms, (*ended, *latest.ended)[-ENDED_MAX:])
    return found


def _speaker(own: RegionBundle, *, is_note: bool) -> str:
    if is_note:
        return f"A note in the metadata store, signed with the key of the audit log of {own.region},"
    return f"The audit log of {own.region}"


def _changed(last: LoggedKey) -> str:
    return datetime.fromtimestamp(last.time_ms / 1000, UTC).isoformat(timespec="seconds")


def keys_of_now(own: RegionBundle, role: Role) -> tuple[bytes, ...]:
    return own.policy_keys if role == "policy" else own.receipt_keys


def former_keys(own: RegionBundle, role: Role) -> list[bytes]:
    return [
        public
        for keys in own.former
        for public in (keys.policy_keys if role == "policy" else keys.receipt_keys)
    ]
