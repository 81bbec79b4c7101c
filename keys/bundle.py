"""A region's public bundle, `bundle.json`: all that another region needs to know of it before they exchange anything.

The file is JSON; bytes are base64. The signature is Ed25519, for the purpose `region-bundle`, over the body as JSON
with sorted names and no white space, so a file may be laid out as one likes. It is made by one of the policy keys that
the body itself names: it shows that the bundle was not changed since, not whose it is. Whose it is, people see by the
fingerprint, which they compare over another way than the file came. It is over what founds the region, and so stays the
same when a bridge joins with its log (`RegionBundle.fingerprint`).

Invariants of a decoded `SignedBundle`, each checked again at decoding:
1. the shape holds: names, sizes and numbers as typed here, no field too many;
2. it names only its own region's things: the root certificate is this region's and mesh's, every audit key is called
   `<region>.<mesh>/…`, and every key is a key;
3. no former key is a key of now, nor stands twice in one role; each of their logs is of this mesh, and named once;
4. the signature holds under one of its own policy keys, of now.

A new bundle, whoever compared it, must also pass `check_bundle`: no two of its audit keys can be taken for each other. One that was
trusted before there was this rule is still read.

An update is taken without people comparing again only where `check_update` holds: its fingerprint is the same, and it adds logs of new
bridges behind those that were there, each under a key that nobody was compared to have. A holder of a policy key can sign one, so an update must not
extend that key's power. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final, Literal

import msgspec

from felix.errors import Code, RequestError, TamperError, of_later_release
from felix.names import trust_domain
from felix.peer import TrustAnchor
from keys.hybrid import PUBLIC_BYTES, HybridPublicKey
from keys.note_key import COSIGNATURE_TYPE, ED25519_TYPE, ML_DSA_44_TYPE, note_key_id
from keys.post_quantum import ML_DSA_PUBLIC_BYTES, check_ml_dsa_public
from keys.signing import PUBLIC_BYTES as ED25519_PUBLIC_BYTES
from keys.signing import SIGNATURE_BYTES, SigningKey, VerifyKey

BUNDLE_BYTES_MAX: Final = 65_536
"""A bundle takes about 4 KiB; the rest is room for keys that are being rotated."""
KEYS_MAX: Final = 16
"""Keys of one kind: the one in use, and some that it takes over from or hands over to."""
FORMER_MAX: Final = 16
"""Changes of policy and receipt keys of which the former ones are named."""
ENDS_MAX: Final = 256
"""Logs in which keys that ended together may have signed something: some 130 bytes each."""
AUDIT_KEYS_MAX: Final = 32
"""Half of them ML-DSA-44 keys, of 1.8 kB in base64 each: the region's log and witness, and the logs of 14 bridges."""
ISSUED_AHEAD_MS_MAX: Final = 600_000
"""How far ahead of this machine's clock a successor that nobody compares may be issued: two clocks that are wrong by minutes. What is later keeps all
honest successors out."""
_PURPOSE: Final = "region-bundle"
_FOUNDING: Final = b"felix region founding\n"
"""Stands before what the fingerprint is over, so that it is the digest of nothing else."""

Known = Mapping[bytes, str]
"""Public keys that people compared as somebody's, and whose each is, in words. Never one that a region alone says is a bridge's log's: else
whoever names the key of another region's next bridge first would have that region's update refused."""
NOBODYS: Final[Known] = MappingProxyType({})

PublicKeyBytes = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
PublicKeys = Annotated[tuple[PublicKeyBytes, ...], msgspec.Meta(min_length=1, max_length=KEYS_MAX)]


LogSize = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class AuditKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key that signs audit checkpoints (`log`) or cosigns those of others (`cosigner`), by its name in signed notes.

    A log or witness may have one of each algorithm, under one name; a log those besides that signed before, each up to its size. `ed25519` is left out of the file, so bundles from
    before there was another one are signed over the same bytes.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    role: Literal["log", "cosigner"]
    public: Annotated[bytes, msgspec.Meta(min_length=32, max_length=ML_DSA_PUBLIC_BYTES)]
    algorithm: Literal["ed25519", "ml-dsa-44"] = "ed25519"
    from_size: LogSize = 0
    """a log's key signs checkpoints of so many leaves or more"""
    to_size: LogSize | None = None
    """and of so many at most, where another one signs from there on"""

    def check(self) -> None:
        """Raises RequestError(INVALID) where these are not the bytes of a key of this algorithm, or its sizes are none."""
        if self.role != "log" and (self.from_size or self.to_size is not None):
            raise RequestError(f"{self.name} is no log, so its key has no sizes.", code=Code.INVALID)
        if self.to_size is not None and self.to_size < self.from_size:
            raise RequestError(
                f"A key of {self.name} ends at {self.to_size} leaves, before it begins at {self.from_size}.",
                code=Code.INVALID,
            )
        what, size = (
            ("Ed25519", ED25519_PUBLIC_BYTES)
            if self.algorithm == "ed25519"
            else ("ML-DSA-44", ML_DSA_PUBLIC_BYTES)
        )
        if len(self.public) != size:
            raise RequestError(
                f"Not an {what} public key: {len(self.public)} bytes, not {size}.", code=Code.INVALID
            )

    def check_usable(self) -> None:
        """Raises RequestError(INVALID) for a key under which anybody's signatures hold. Nothing is verified under one (audit.trust), and it
        stops nobody who trusted its bundle before such keys were refused: a region adds logs by itself."""
        if self.algorithm == "ed25519":
            VerifyKey(self.public)
        else:
            check_ml_dsa_public(self.public)

    @property
    def key_id(self) -> bytes:
        """By which lines of signed notes name this key, besides its name (keys.note_key)."""
        ed25519 = ED25519_TYPE if self.role == "log" else COSIGNATURE_TYPE
        return note_key_id(self.name, ed25519 if self.algorithm == "ed25519" else ML_DSA_44_TYPE, self.public)

    def contends(self, other: AuditKey) -> bool:
        """Whether both are keys of one log, and may sign the same checkpoints. Where one ends another begins, both may sign one size."""
        if (self.role, self.name, self.algorithm) != ("log", other.name, other.algorithm):
            return False
        return self.public == other.public or (
            (self.to_size is None or other.from_size < self.to_size)
            and (other.to_size is None or self.from_size < other.to_size)
        )


class KeyEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where keys ended in one log: what they signed counts in its first `size` leaves, as they were then: their tree has this `root`."""

    log: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    size: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    root: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


FormerPublicKeys = Annotated[tuple[PublicKeyBytes, ...], msgspec.Meta(max_length=KEYS_MAX)]


class FormerKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Keys that ended together. They sign nothing any more; what they signed counts below their ends, and in no other log."""

    policy_keys: FormerPublicKeys = ()
    receipt_keys: FormerPublicKeys = ()
    ends: Annotated[tuple[KeyEnd, ...], msgspec.Meta(max_length=ENDS_MAX)] = ()

    def end_in(self, log: str) -> KeyEnd | None:
        """Where they ended in this log; None where they count for nothing."""
        return next((end for end in self.ends if end.log == log), None)


class RegionBundle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a region tells others. `country` is ISO 3166-1 alpha-2; `jurisdiction` is for people and policies. `policy_keys` and `receipt_keys` are those
    of now; former ones stand in `former_keys`, which is left out where there are none: such bundles are of format 1, and the same bytes as before."""

    format: Literal[1, 2] = 1
    region: str
    mesh: str
    country: Annotated[str, msgspec.Meta(pattern=r"\A[A-Z]{2}\Z")]
    jurisdiction: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    issued_ms: Annotated[int, msgspec.Meta(ge=0)]
    root_pem: Annotated[str, msgspec.Meta(max_length=8192)]
    policy_keys: PublicKeys
    receipt_keys: PublicKeys
    audit_keys: Annotated[tuple[AuditKey, ...], msgspec.Meta(max_length=AUDIT_KEYS_MAX)]
    import_key: Annotated[bytes, msgspec.Meta(min_length=PUBLIC_BYTES, max_length=PUBLIC_BYTES)]
    former_keys: (
        Annotated[tuple[FormerKeys, ...], msgspec.Meta(min_length=1, max_length=FORMER_MAX)]
        | msgspec.UnsetType
    ) = msgspec.UNSET
    """the earliest first"""

    @property
    def former(self) -> tuple[FormerKeys, ...]:
        """Keys that ended, the earliest first."""
        return () if self.former_keys is msgspec.UNSET else self.former_keys

    def with_former(self, former: tuple[FormerKeys, ...]) -> RegionBundle:
        """The same with these former keys, in the format that they ask for."""
        return msgspec.structs.replace(self, format=2 if former else 1, former_keys=former or msgspec.UNSET)

    def anchor(self) -> TrustAnchor:
        """The root that verifies this region's identities."""
        return TrustAnchor(self.region, self.mesh, self.root_pem.encode())

    def hybrid_import_key(self) -> HybridPublicKey:
        """What transfer keys for this region are sealed to."""
        return HybridPublicKey(self.import_key)

    def signed_bytes(self) -> bytes:
        """What the signature is over."""
        return msgspec.json.encode(self, order="sorted")

    def bridge_logs(self) -> tuple[AuditKey, ...]:
        """The keys of bridges' egress logs: what the fingerprint leaves out."""
        bridges = f"{trust_domain(self.region, self.mesh)}/bridge/"
        return tuple(key for key in self.audit_keys if key.role == "log" and key.name.startswith(bridges))

    def former_public_keys(self) -> frozenset[bytes]:
        """Keys that ended: somebody else may have them."""
        return frozenset(public for keys in self.former for public in (*keys.policy_keys, *keys.receipt_keys))

    def public_keys(self) -> frozenset[bytes]:
        """Every key that could cosign, whatever it is for. (Those of certificates are on another curve.)"""
        now = (*self.policy_keys, *self.receipt_keys, *(key.public for key in self.audit_keys))
        return self.former_public_keys().union(now)

    def compared_keys(self) -> frozenset[bytes]:
        """Those that change by a compared fingerprint alone: named as something else than a bridge's log, whether as one besides or not."""
        bridges = set(self.bridge_logs())
        own = (key.public for key in self.audit_keys if key not in bridges)
        return self.former_public_keys().union((*self.policy_keys, *self.receipt_keys, *own))

    def fingerprint(self) -> str:
        """What people read to each other: SHA-256 of what founds the region, in 16 groups of four hexadecimal digits.

        That is all but the logs of bridges and the time of issue: name, mesh, country, root certificate, policy, receipt and
        import keys, former ones and where they ended, the region's own log and its witness. Whatever of it changes, people compare again.
        """
        bridges = set(self.bridge_logs())
        own = tuple(key for key in self.audit_keys if key not in bridges)
        founding = msgspec.structs.replace(self, issued_ms=0, audit_keys=own)
        return _grouped(_FOUNDING + founding.signed_bytes())

    def whole_fingerprint(self) -> str:
        """The same over the whole bundle, which changes with every bridge. It is compared where the key of a log that is
        trusted was replaced or taken away, which `fingerprint` cannot vouch for."""
        return _grouped(self.signed_bytes())


def _grouped(data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    return " ".join(digest[at : at + 4] for at in range(0, 64, 4))


class SignedBundle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bundle and the signature of one of its policy keys."""

    bundle: RegionBundle
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]

    def encode(self) -> bytes:
        """The file, laid out for people."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


_decoder: Final = msgspec.json.Decoder(SignedBundle)


def sign_bundle(bundle: RegionBundle, policy_key: SigningKey) -> SignedBundle:
    """Raises RequestError(INVALID) where `policy_key` is not among the bundle's own, or the bundle does not hold."""
    signed = SignedBundle(bundle, policy_key.sign(_PURPOSE, bundle.signed_bytes()))
    if policy_key.verify_key.public not in bundle.policy_keys:
        raise RequestError("A bundle is signed with one of the policy keys that it names.", code=Code.INVALID)
    # Whatever is written can be read, and trusted: the same checks, before rather than after.
    read = decode_bundle(signed.encode())
    check_bundle(read)
    return read


def decode_bundle(data: bytes) -> SignedBundle:
    """A bundle that holds; before it is trusted newly, it must also pass `check_bundle`. Raises RequestError(INVALID) for its shape, TamperError for its signature."""
    if len(data) > BUNDLE_BYTES_MAX:
        raise RequestError(f"A bundle of {len(data)} bytes; {BUNDLE_BYTES_MAX} are allowed.")
    # 1. the shape
    try:
        signed = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(
            f"This is not a region's bundle: {error}.",
            hint=of_later_release(error) or "Have that region export its bundle again.",
        ) from error
    check_holds(signed)
    return signed


def check_holds(signed: SignedBundle) -> None:
    """Invariants 2 to 4 of a bundle that has its shape. Raises RequestError, TamperError."""
    bundle = signed.bundle
    # 2. its parts
    domain = trust_domain(bundle.region, bundle.mesh)
    bundle.anchor()
    for audit_key in bundle.audit_keys:
        if not audit_key.name.startswith(f"{domain}/"):
            raise RequestError(
                f"The bundle of {domain} names {audit_key.name[:200]!r}, which is not its own: a region speaks for "
                "itself alone.",
                code=Code.WRONG_REGION,
                hint="Do not trust it; ask that region's operator how it came about.",
            )
    bundle.hybrid_import_key()
    keys = [VerifyKey(public) for public in bundle.policy_keys]
    for public in bundle.receipt_keys:
        VerifyKey(public)
    for at, audit_key in enumerate(bundle.audit_keys):
        audit_key.check()
        if any(audit_key.contends(other) for other in bundle.audit_keys[:at]):
            raise RequestError(
                f"The bundle of {domain} names two keys of {audit_key.name} for the same checkpoints.",
                code=Code.INVALID,
            )
    # 3. its former keys
    _check_former(bundle)
    # 4. the signature
    message = bundle.signed_bytes()
    if not any(key.holds(_PURPOSE, message, signed.signature) for key in keys):
        raise TamperError(
            f"The bundle of {bundle.region} is not signed by one of its own policy keys: it was changed.",
            hint="Get it again from that region, and compare its fingerprint.",
        )


def _check_former(bundle: RegionBundle) -> None:
    """Raises RequestError(INVALID) where a former key is one of now, or stands twice, or a log is named twice or is of another mesh."""
    domain = trust_domain(bundle.region, bundle.mesh)
    if bundle.format != (2 if bundle.former else 1):
        raise RequestError(
            f"The bundle of {domain} is of format {bundle.format}: one with former keys is of format 2, one without of format 1.",
            code=Code.INVALID,
        )
    now = {*bundle.policy_keys, *bundle.receipt_keys, *(key.public for key in bundle.audit_keys)}
    for publics in (
        [public for keys in bundle.former for public in keys.policy_keys],
        [public for keys in bundle.former for public in keys.receipt_keys],
    ):
        for public in publics:
            VerifyKey(public)
        if len(set(publics)) < len(publics) or not now.isdisjoint(publics):
            raise RequestError(
                f"The bundle of {domain} names a former key twice, or as a key of now.",
                code=Code.INVALID,
                hint=f"Ask {bundle.region}'s operator. A key that ended is used for nothing again.",
            )
    for keys in bundle.former:
        logs = [end.log for end in keys.ends]
        if len(set(logs)) < len(logs) or not (keys.policy_keys or keys.receipt_keys):
            raise RequestError(
                f"The bundle of {domain} says twice where keys ended in one log, or where none ended.",
                code=Code.INVALID,
            )
        for log in logs:
            if not log.partition("/")[0].endswith(f".{bundle.mesh}"):
                raise RequestError(
                    f"The bundle of {domain} says where a key ended in {log[:200]!r}, which is no log of mesh {bundle.mesh}.",
                    code=Code.INVALID,
                )


def check_bundle(signed: SignedBundle, trusted: RegionBundle | None = None) -> None:
    """That this bundle may be trusted newly: it holds, and none of its audit keys can be taken for another one, nor for one of `trusted`,
    in whose place it comes; nor holds anybody's signature under one of them.

    Two keys of one name and one id are found in seconds, and never come about by chance; which of them signed a line would depend on who
    tries them in which order. Raises RequestError, TamperError.
    """
    check_holds(signed)
    bundle = signed.bundle
    before = () if trusted is None else trusted.audit_keys
    held = {key.public for key in before}
    for at, key in enumerate(bundle.audit_keys):
        key.check_usable()
        earlier = bundle.audit_keys[:at]
        # A key that was there before is compared with no other one of then: taking one of two away repairs a bundle from before this rule.
        for other in (*earlier, *(before if key.public not in held else ())):
            is_same = (other.public, other.role) == (key.public, key.role)
            if (other.name, other.key_id) == (key.name, key.key_id) and not is_same:
                raise _not_distinct(bundle, f"two keys of {key.name} with one key id, {key.key_id.hex()}")
        twin = next((other for other in earlier if other.public == key.public), None)
        if twin is not None:
            raise _not_distinct(bundle, f"one key as {twin.name} and as {key.name}")


def _not_distinct(bundle: RegionBundle, what: str) -> RequestError:
    return RequestError(
        f"The bundle of {bundle.region} names {what}: what either signed could be taken for the other's.",
        code=Code.INVALID,
        hint=f"Do not trust it; ask {bundle.region}'s operator. No such keys come about by chance.",
    )


_FIXED: Final = (
    ("root_pem", "another root certificate"),
    ("policy_keys", "other policy keys"),
    ("receipt_keys", "other receipt keys"),
    ("import_key", "another import key"),
    ("country", "another country"),
    ("jurisdiction", "another jurisdiction"),
)
"""What stays as people compared it, and how a refusal calls it: who may speak for the region, what is sealed to it, and
where it is."""


def changes_of(trusted: RegionBundle, new: RegionBundle, known: Known = NOBODYS) -> list[str]:
    """What a bundle of the same region says otherwise than the trusted one and only people may agree to, in words; whatever changes the
    fingerprint is among it. `known`: compared keys of others.

    New logs of bridges are nothing of it: under a new name, and a key that is nobody's yet, they say nothing about what was there before.
    """
    found = [words for name, words in _FIXED if getattr(new, name) != getattr(trusted, name)]
    found += _former_changes(trusted, new)
    found += _key_changes(trusted.audit_keys, new.audit_keys)
    bridges = {key.name for key in new.bridge_logs()}
    names = {key.name for key in trusted.audit_keys}
    found += [
        f"the new log {key.name}, which is no bridge's"
        for key in new.audit_keys
        if key.role == "log" and key.name not in names and key.name not in bridges
    ]
    found += _taken_keys(trusted, new, known)
    if not found and new.fingerprint() != trusted.fingerprint():
        found.append("another fingerprint")
    return found


def _former_changes(trusted: RegionBundle, new: RegionBundle) -> list[str]:
    """How former keys changed, in words: none may be added, moved, taken away or brought back, nor its end changed, without people."""
    if new.former == trusted.former:
        return []
    found = []
    for role in ("policy", "receipt"):
        name = f"{role}_keys"
        before = {public: keys for keys in trusted.former for public in getattr(keys, name)}
        after = {public: keys for keys in new.former for public in getattr(keys, name)}
        unknown = after.keys() - before.keys() - set(getattr(trusted, name))
        back = before.keys() & set(getattr(new, name))
        ended = after.keys() & set(getattr(trusted, name))
        gone = before.keys() - after.keys() - back
        both = before.keys() & after.keys()
        found += [f"a former {role} key that was none of its {role} keys"] * bool(unknown)
        found += [f"a {role} key that had ended"] * bool(back)
        found += [f"an end of a {role} key"] * bool(ended)
        found += [f"no former {role} key any more that it named"] * bool(gone)
        found += [f"other ends of a former {role} key"] * any(
            set(before[public].ends) != set(after[public].ends) for public in both
        )
    return found or ["its former keys in another order"]


def changes_beyond_fingerprint(
    trusted: RegionBundle | None, new: RegionBundle, known: Known = NOBODYS
) -> list[str]:
    """Those of `changes_of` that a compared `fingerprint` says nothing of: other keys of bridges' logs, or fewer, or of somebody else.
    `trusted`: None where no bundle of the region is."""
    before = () if trusted is None else trusted.bridge_logs()
    return _key_changes(before, new.bridge_logs()) + _taken_keys(trusted, new, known)


def _key_changes(trusted: tuple[AuditKey, ...], new: tuple[AuditKey, ...]) -> list[str]:
    before, after = set(trusted), set(new)
    names = {key.name for key in trusted}
    found = [f"no key {key.name} any more, or another one" for key in trusted if key not in after]
    for key in new:
        if key not in before and key.name in names:
            found.append(f"one more key {key.name}")
        elif key not in before and key.role != "log":
            found.append(f"the new witness {key.name}")
    if not found and new[: len(trusted)] != trusted:
        found.append("its keys in another order")
    return found


def _taken_keys(trusted: RegionBundle | None, new: RegionBundle, known: Known) -> list[str]:
    """Logs of new bridges whose keys are somebody's already, the region's own among them."""
    names = set() if trusted is None else {key.name for key in trusted.audit_keys}
    own = frozenset[bytes]() if trusted is None else trusted.public_keys()
    own |= new.compared_keys()
    return [
        f"the log {key.name} under a key of {known.get(key.public, 'its own that is there already')}"
        for key in new.bridge_logs()
        if key.name not in names and (key.public in own or key.public in known)
    ]


def brought_back(trusted: RegionBundle, new: RegionBundle) -> list[str]:
    """Of which keys that the trusted bundle gave up this one says that they sign still, or further than they did, in words."""
    found = [
        f"a {role} key"
        for role, now, former in (
            ("policy", new.policy_keys, [key for each in trusted.former for key in each.policy_keys]),
            ("receipt", new.receipt_keys, [key for each in trusted.former for key in each.receipt_keys]),
        )
        if not set(now).isdisjoint(former)
    ]
    ended = {
        (key.name, key.public): key.to_size
        for key in trusted.audit_keys
        if key.role == "log" and key.to_size is not None
    }
    for key in new.audit_keys:
        end = ended.get((key.name, key.public)) if key.role == "log" else None
        if end is not None and (key.to_size is None or key.to_size > end):
            found.append(f"a key of the log {key.name}")
    return list(dict.fromkeys(found))


def check_update(trusted: RegionBundle, update: SignedBundle, known: Known = NOBODYS) -> None:
    """That `update` may take the place of `trusted` without people comparing fingerprints again.

    It must be of the same region and mesh, newer, signed by a policy key that was trusted before, have the same fingerprint, and
    differ in nothing but new bridges' logs, of keys that are none of `known` nor of its own. So it adds no former key, moves no end of one, and brings none back. Raises RequestError(WRONG_REGION | CONFLICT), TamperError.
    """
    new = update.bundle
    if (new.region, new.mesh) != (trusted.region, trusted.mesh):
        raise RequestError(
            f"A bundle of {new.region}.{new.mesh} cannot replace that of {trusted.region}.{trusted.mesh}.",
            code=Code.WRONG_REGION,
        )
    if new.issued_ms <= trusted.issued_ms:
        raise RequestError(
            f"The bundle of {new.region} is not newer than the one that is trusted.", code=Code.CONFLICT
        )
    changed = changes_of(trusted, new, known)
    message = new.signed_bytes()
    if not any(
        VerifyKey(public).holds(_PURPOSE, message, update.signature) for public in trusted.policy_keys
    ):
        changed.append("no signature by a policy key that was trusted")
    if changed:
        raise TamperError(
            f"The new bundle of {new.region} has {', '.join(changed)}.",
            hint=f"Ask {new.region}'s operator. If it is so, compare the fingerprint and trust it again: "
            "felix region trust FILE --fingerprint ….",
        )


def check_not_ahead(bundle: RegionBundle, now_ms: int) -> None:
    """That a successor is not issued in the future: none that comes later would be newer. Raises RequestError(CONFLICT)."""
    if bundle.issued_ms > now_ms + ISSUED_AHEAD_MS_MAX:
        raise RequestError(
            f"The bundle of {bundle.region} is issued {(bundle.issued_ms - now_ms) // 60_000} minutes ahead of the clock here.",
            code=Code.CONFLICT,
            hint=f"Compare the clocks. If they are right, ask {bundle.region}'s operator who signed it.",
        )
