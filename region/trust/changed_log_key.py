"""What says that the keys of a region's own audit log were changed, where several brokers have copies of it: a leaf in the log, and words in the metadata store. Pure.

A broker with the folder of before a change (`bundle.json`, `secrets/`) would sign on with the former key, beside those that have the keys of now. Two things keep it from that:

- a KEY leaf, `log-key-changed`, which the first broker that writes the log under the new key appends. A broker whose bundle does not name that key for the log has the folder of before;
- until that leaf is there, a word in the store, which the command signs with the key that ends by it. So whoever has the former key alone believes it, and nobody else asks. Words of earlier
  changes stay, for folders of before these.

Whoever can write the store, and has no key of the log, can take words out, and add none that anybody believes; whoever has the key of now besides can stop the region's brokers until it has other ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from audit.leaf import Header, Kind, Leaf
from audit.origin import region_origin
from keys.bundle import AuditKey, PublicKeyBytes, RegionBundle
from keys.signing import SIGNATURE_BYTES, SigningKey, VerifyKey
from region.trust.signing_key_leaves import key_id_of, key_leaf

LOG_KEY_CHANGED: Final = "log-key-changed"
CHANGED_SENTENCE: Final = "The keys that sign this log's checkpoints were changed."
WORDS_MAX: Final = 64
"""Changes of which the store has a word; of more, the earliest go."""
WORDS_BYTES_MAX: Final = 64 * 1024
STALE_HINT: Final = (
    "Put bundle.json, secrets/audit.pem and secrets/audit.mldsa.pem of after the change into this broker's folder, and start it again. Where the change was cut off: run "
    "felix region change-log-keys again where it was begun, which finishes it."
)
_PURPOSE: Final = "log-key-ended"


class EndedLogKey(msgspec.Struct, frozen=True, kw_only=True):
    """That the log of `region` is signed by another key from now on. `public`: the Ed25519 key that ended, which signed this over all else as JSON with sorted names. `successor`: the one
    that signs next; `time_ms`: Unix time."""

    region: str
    mesh: str
    public: PublicKeyBytes
    successor: PublicKeyBytes
    time_ms: int
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""

    def signed_bytes(self) -> bytes:
        """What the signature covers."""
        return msgspec.json.encode(msgspec.structs.replace(self, signature=b""), order="sorted")


class _Words(msgspec.Struct, frozen=True):
    words: list[EndedLogKey]
    format: Literal[1] = 1


class LogKeyLeaf(NamedTuple):
    """What the log is to say of the key that signs it."""

    key_id: bytes

    @property
    def role(self) -> str:
        return "audit log"

    def leaf(self, own: str, now_ms: int, actor: str = "") -> Leaf:
        return key_leaf(own, now_ms, actor, LOG_KEY_CHANGED, self.key_id, CHANGED_SENTENCE)


# Made here: msgspec learns a type at its first use, not safely on two threads.
_decoder: Final = msgspec.json.Decoder(_Words)


def log_keys_of(own: RegionBundle) -> list[AuditKey]:
    """The Ed25519 keys of the region's own log, the one of now and those before."""
    origin = region_origin(own.region, own.mesh)
    return [
        key for key in own.audit_keys if (key.role, key.name, key.algorithm) == ("log", origin, "ed25519")
    ]


def unsaid_log_key(own: RegionBundle, says: Callable[[bytes], bool]) -> LogKeyLeaf | None:
    """What the log is to say of its own keys, and does not yet. `says`: whether a leaf of it has this id (`says_changed`)."""
    keys = log_keys_of(own)
    if all(key.to_size is None for key in keys):
        return None
    now = next((key_id_of(key.public) for key in keys if key.to_size is None), b"")
    return LogKeyLeaf(now) if now and not says(now) else None


def says_changed(header: Header) -> bool:
    """Whether this is a leaf of changed keys of a log that has copies. What the command writes of a change into a log that one process writes (`rotated`) is none: it stands before the end, also where the
    change was cut off and never was, so no broker ends by it. Of a log that was copied after such a change, the first broker that writes it says so once more."""
    return header.kind is Kind.KEY and header.action == LOG_KEY_CHANGED


def stale_log_key(own: RegionBundle, key_id: bytes, index: int) -> str:
    """A sentence where this bundle does not name the key that the leaf of the log at `index` says signs it (`says_changed`); else nothing. The leaf of a change stands behind the keys' end: so one in
    front of where this bundle's newest keys begin is of no later change, whatever it names."""
    keys = log_keys_of(own)
    if index < max((key.from_size for key in keys), default=0) or any(
        key_id_of(key.public) == key_id for key in keys
    ):
        return ""
    return f"The audit log of {own.region} says that its keys were changed, and bundle.json in this folder does not name the new one: the file is of before that."


def sign_word(own: RegionBundle, key: SigningKey, successor: bytes, now_ms: int) -> EndedLogKey:
    """`key`: the one that ends."""
    word = EndedLogKey(
        region=own.region,
        mesh=own.mesh,
        public=key.verify_key.public,
        successor=successor,
        time_ms=now_ms,
    )
    return msgspec.structs.replace(word, signature=key.sign(_PURPOSE, word.signed_bytes()))


def with_word(held: bytes | None, word: EndedLogKey, own: RegionBundle) -> bytes:
    """What is to stand in the store: this word, and those that stand there, and hold, of other keys that this bundle names for the log. What else stands there is left out: it would make what the brokers
    read too long, or have words of earlier changes go."""
    named = {key.public for key in log_keys_of(own)} - {word.public}
    others = [each for each in _words(held) if each.public in named and _holds(each, own)]
    return msgspec.json.encode(_Words([*others, word][-WORDS_MAX:]))


def word_of(held: bytes | None, own: RegionBundle) -> EndedLogKey | None:
    """The word in what stands in the store that a key ended which this bundle names as one of now, signed with that key; None where there is none."""
    now = {key.public for key in log_keys_of(own) if key.to_size is None}
    for word in _words(held):
        if word.public in now and _holds(word, own):
            return word
    return None


def ended_word(held: bytes | None, own: RegionBundle) -> str:
    """A sentence where there is such a word; else nothing."""
    if word_of(held, own) is None:
        return ""
    return (
        f"A word in the metadata store, signed with the key of the audit log of {own.region} that this folder names, says that other keys sign the log now: the folder is of before "
        "that change."
    )


def _holds(word: EndedLogKey, own: RegionBundle) -> bool:
    is_ours = (word.region, word.mesh) == (own.region, own.mesh)
    return is_ours and VerifyKey(word.public).holds(_PURPOSE, word.signed_bytes(), word.signature)


def _words(held: bytes | None) -> list[EndedLogKey]:
    if held is None or len(held) > WORDS_BYTES_MAX:
        return []
    try:
        return _decoder.decode(held).words[-WORDS_MAX:]
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # Of somebody who can write the store; he could as well have taken it out.
        return []
