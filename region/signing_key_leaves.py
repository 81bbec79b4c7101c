"""What a region's own audit log says of its policy and receipt keys: which ones it has since its last change, by KEY leaves. Pure.

A folder of before a change (`bundle.json`, `secrets/`) that is put back beside a log that goes on would take up the former keys again, and with them whoever
stole them. The log says which keys the change brought, so a broker with a bundle that does not know them does not begin. A bundle that is issued after such a leaf
is no earlier one: whoever has lost the new keys changes them again, from the folder that is left.

The command writes these leaves where one process writes the log (region.signing_keys); of a log of which several brokers have copies, the one that writes it does
(region.governance.key_leaves).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final, Literal, NamedTuple

from audit.leaf import KEY_ID_BYTES, Header, Kind, Leaf, Side
from keys.bundle import RegionBundle

Role = Literal["policy", "receipt"]
ROLES: Final[tuple[Role, ...]] = ("policy", "receipt")
ACTIONS: Final[Mapping[Role, str]] = {"policy": "policy-key-changed", "receipt": "receipt-key-changed"}


STALE_HINT: Final = (
    "Put bundle.json and secrets/ of after the change into the folder, and start the broker again. Where the change was cut off, or they are lost, run felix region change-signing-keys, have the other "
    "regions compare the bundle, and sign again what stands: what the lost keys signed counts for nothing then."
)


class LoggedKey(NamedTuple):
    """A role's key as the log's last leaf of it names it, and since when (Unix time)."""

    key_id: bytes
    time_ms: int


LoggedKeys = Mapping[str, LoggedKey]
"""By `ACTIONS`."""


def key_id_of(public: bytes) -> bytes:
    """What a KEY leaf calls a public key."""
    return sha256(public).digest()[:KEY_ID_BYTES]


def changed_key_leaf(own: str, role: Role, public: bytes, now_ms: int, actor: str = "") -> Leaf:
    """The region's key of this role is this one from here on."""
    return Leaf(
        Header(
            kind=Kind.KEY,
            side=Side.INGRESS,
            time_ms=now_ms,
            source_region=own,
            destination_region=own,
            actor=actor,
            action=ACTIONS[role],
            key_id=key_id_of(public),
            sentence=f"The region's {role} key was changed.",
        )
    )


def stale_key(own: RegionBundle, logged: LoggedKeys) -> str:
    """A sentence where the bundle is of before a change that the log has; else nothing."""
    for role in ROLES:
        last = logged.get(ACTIONS[role])
        if last is not None and own.issued_ms < last.time_ms and last.key_id not in _named(own, role):
            changed = datetime.fromtimestamp(last.time_ms / 1000, UTC).isoformat(timespec="seconds")
            return (
                f"The audit log of {own.region} says that the region's {role} key was changed at {changed}, and bundle.json in this folder is of "
                "before that: its keys are ones that the region gave up."
            )
    return ""


def unlogged(own: RegionBundle, logged: LoggedKeys) -> dict[Role, bytes]:
    """The keys of now that a change brought and the log does not name yet."""
    found: dict[Role, bytes] = {}
    for role in ROLES:
        public, last = _of_now(own, role)[0], logged.get(ACTIONS[role])
        was_changed = last is not None or any(_former(own, role))
        if was_changed and (last is None or last.key_id not in map(key_id_of, _of_now(own, role))):
            found[role] = public
    return found


def _of_now(own: RegionBundle, role: Role) -> tuple[bytes, ...]:
    return own.policy_keys if role == "policy" else own.receipt_keys


def _former(own: RegionBundle, role: Role) -> list[bytes]:
    return [
        public
        for keys in own.former
        for public in (keys.policy_keys if role == "policy" else keys.receipt_keys)
    ]


def _named(own: RegionBundle, role: Role) -> set[bytes]:
    return {key_id_of(public) for public in (*_of_now(own, role), *_former(own, role))}
