"""Trust: which keys may say what, region by region. Pure.

A statement of a region verifies under keys of that region, and of no other. Nothing here merges the keys of two
regions into one collection; who verifies something first asks whose statement it is, and then has that region's keys
alone:

- a log verifies under the region that its origin names (`Trust.log`), and its leaves speak for that region;
- a receipt verifies under the keys of its destination, and names that region's own log (audit.keys_in_log);
- a cosignature counts for whoever gave it, once, however many keys it has; the log's own region never counts, by none of its keys;
- a key that people compared as a witness's stays that one's: what a region says of it later, uncompared, takes no cosignature away;
- no two parties have one witness's key: a cosignature does not cover its signer's name, so anybody could say that it is the other one's;
- whose cosignatures are asked for is one question, and what a region has seen another: a region's own witness shows that where a policy does not list it, too;
- cosignatures are counted on one checkpoint (`LogTrust.covered`): who cosigned another one has not seen what is behind it;
- signed documents verify under the policy keys of the region that they name (`Trust.policy_keys`);
- a key that ended counts in the logs in which its region says that it did, below its end (`Trust.endings`, audit.keys_in_log), and nowhere else.

Callers: cli (from bundles), audit.verify, audit.proof, audit.agreement, audit.spark, bridge and region for their
peers' bundles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import msgspec

from audit.checkpoint import SignedCheckpoint, open_checkpoint
from audit.note import Algorithm, Verified, VerifierKey, parse_note
from audit.origin import Origin, region_origin
from audit.signed_body import ReceiptKeys
from audit.witness_policy import WitnessPolicy
from felix.errors import Code, RequestError, TamperError
from felix.names import trust_domain
from felix.peer import TrustAnchor, TrustBundle
from keys.bundle import AuditKey, RegionBundle
from policy.signed import key_id

WHO_COSIGNED: Final = (
    "Trust those who cosigned it: give the bundle of each region with --bundle, or witnesses with --policy."
)
COSIGNATURES_MIN: Final = 1
"""Cosigners that verify, check-proof and report ask for unless they are told otherwise: with none, a log's owner can
write its history anew at any time."""


class Ending(NamedTuple):
    """A former key of a region, and where it ended in one log: at so many leaves, whose tree had this root."""

    region: str
    role: Literal["policy", "receipt"]
    public: bytes
    size: int
    root: bytes


@dataclass(frozen=True, slots=True)
class RegionTrust:
    """What one region's bundle says, as keys that are used for this region and nothing else."""

    bundle: RegionBundle
    anchor: TrustAnchor = field(init=False, compare=False, repr=False)
    """verifies the region's identities, its approvers among them"""
    receipt_keys: ReceiptKeys = field(init=False, compare=False, repr=False)
    logs: tuple[VerifierKey, ...] = field(init=False, compare=False, repr=False)
    """of the region's own log and of its bridges' egress logs, by origin"""
    witnesses: tuple[VerifierKey, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        bundle = self.bundle
        domain = trust_domain(bundle.region, bundle.mesh)
        for key in bundle.audit_keys:
            assert key.name.startswith(f"{domain}/"), (
                "keys.bundle lets a bundle name only its own region's things"
            )
        made = {
            "anchor": bundle.anchor(),
            "receipt_keys": ReceiptKeys.of(
                bundle.region, region_origin(bundle.region, bundle.mesh), bundle.receipt_keys
            ),
            "logs": _keys(bundle, "log", Algorithm.ED25519),
            "witnesses": _keys(bundle, "cosigner", Algorithm.COSIGNATURE),
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[type[RegionTrust], tuple[RegionBundle]]:
        """To another process go the bundle's bytes: certificates that are read already cannot be sent."""
        return RegionTrust, (self.bundle,)

    @property
    def public_keys(self) -> frozenset[bytes]:
        """Every key of the bundle that could cosign, whatever it is for."""
        return self.bundle.public_keys()

    @property
    def compared_keys(self) -> frozenset[bytes]:
        """Those that change by a compared fingerprint alone. The logs of its bridges the region adds by itself."""
        return self.bundle.compared_keys()

    @property
    def region(self) -> str:
        return self.bundle.region

    @property
    def mesh(self) -> str:
        return self.bundle.mesh

    @property
    def country(self) -> str:
        """The region's own word, and no legal field: those come from signed policies."""
        return self.bundle.country

    @property
    def policy_keys(self) -> tuple[bytes, ...]:
        """Ed25519 public keys of the region's policies, grants and standings; those of now."""
        return self.bundle.policy_keys

    def endings(self, origin: str) -> tuple[Ending, ...]:
        """Its former keys that ended in this log. In any other they count for nothing."""
        ended = [(keys, end) for keys in self.bundle.former if (end := keys.end_in(origin)) is not None]
        policy = [
            Ending(self.region, "policy", public, end.size, end.root)
            for keys, end in ended
            for public in keys.policy_keys
        ]
        receipt = [
            Ending(self.region, "receipt", public, end.size, end.root)
            for keys, end in ended
            for public in keys.receipt_keys
        ]
        return (*policy, *receipt)

    def named_sizes(self, origin: str) -> tuple[int, ...]:
        """How many leaves one of its logs had at least, by what its bundle says of keys: where those of the log changed, and where policy and receipt keys ended in it."""
        ends = (end.size for keys in self.bundle.former if (end := keys.end_in(origin)) is not None)
        begins = (key.from_size for key in self.bundle.audit_keys if (key.role, key.name) == ("log", origin))
        return (*ends, *begins)

    def log_keys(self, origin: str) -> tuple[VerifierKey, ...]:
        """The keys of one of its logs: one for each algorithm, and those that signed before. Raises TamperError where it names none."""
        found = tuple(key for key in self.logs if key.name == origin)
        if not found:
            raise TamperError(
                f"The bundle of {self.region} names no key for the audit log {origin[:200]!r}.",
                hint="Take the region's newest bundle; it names the logs of all its bridges.",
            )
        return found

    def earlier_keys(self, origin: str, signing: Iterable[VerifierKey]) -> tuple[VerifierKey, ...]:
        """The keys of one of its logs that signed before those which are to sign now. Raises RequestError(CONFIG_INVALID) where one of
        these has ended, or is none of the log's: nobody would believe what it signs."""
        signing, named = tuple(signing), [key for key in self.logs if key.name == origin]
        ended = next((key for key in named if key in signing and key.to_size is not None), None)
        if ended is not None:
            raise RequestError(
                f"The bundle of {self.region} says that this key of the log {origin} signs up to {ended.to_size} leaves and no further.",
                code=Code.CONFIG_INVALID,
                hint="Put the log's newest key in its place (felix region change-log-keys makes them).",
            )
        if any(key not in named for key in signing):
            raise RequestError(
                f"The bundle of {self.region} does not name a key that is to sign the log {origin} here: nobody would believe what it signs.",
                code=Code.CONFIG_INVALID,
                hint="Put the log's keys and bundle.json of one and the same time into the folder, the newest. Where a change was cut off, run its command again: felix region change-log-keys, "
                "felix region add-log-keys, or felix identity issue for a bridge. Where the log's keys are lost: felix region change-log-keys --lost-keys.",
            )
        return tuple(key for key in named if key not in signing)


def _keys(bundle: RegionBundle, role: str, ed25519: Algorithm) -> tuple[VerifierKey, ...]:
    """Of this role, Ed25519 keys before ML-DSA-44 ones; none under which anybody's signatures hold, in a bundle that was trusted before
    these were refused."""
    found = [
        VerifierKey(
            key.name,
            ed25519 if key.algorithm == "ed25519" else Algorithm.ML_DSA_44,
            key.public,
            key.from_size,
            key.to_size,
        )
        for key in bundle.audit_keys
        if key.role == role and _is_usable(key)
    ]
    return tuple(sorted(found, key=lambda key: key.algorithm.is_post_quantum))


def _is_usable(key: AuditKey) -> bool:
    try:
        key.check_usable()
    except RequestError:
        return False
    return True


def check_cosigner_keys(regions: Iterable[RegionTrust], outside: Iterable[VerifierKey] = ()) -> None:
    """That no two parties have one key to cosign with. Raises RequestError with both."""
    named = [(key.public, f"the region {each.region}") for each in regions for key in each.witnesses]
    named += [(key.public, f"the outside witness {key.name}") for key in outside]
    parties: dict[bytes, str] = {}
    for public, party in named:
        other = parties.setdefault(public, party)
        if other != party:
            raise RequestError(
                f"The same key cosigns for {other} and for {party}: whose a cosignature is, nobody could tell.",
                code=Code.CONFLICT,
                hint="Ask both whose key it is, and do not trust the other one.",
            )


def parties_of(bundles: Iterable[RegionBundle], outside: Iterable[VerifierKey] = ()) -> dict[bytes, str]:
    """Whose each public key is, in words (`keys.bundle.Known`): outside witnesses', and those of regions that people compared. What a region
    names as a bridge's log, by its own word, is no proof that it has that key, and takes it from nobody."""
    known = {key.public: f"the outside witness {key.name}" for key in outside}
    return known | {
        public: f"the region {each.region}" for each in bundles for public in each.compared_keys()
    }


def witnesses_of(bundles: Iterable[RegionBundle], region: str) -> tuple[VerifierKey, ...]:
    """Those whose cosignatures a log of this region keeps: the other regions' witnesses, and none of its own keys that people compared.
    Nothing is counted by it, so two bundles that name one key, which no `Trust` takes, stop no log; and a region takes no witness away
    from its logs by naming the key as one more log of its own."""
    regions = tuple(map(RegionTrust, bundles))
    own = frozenset[bytes]().union(*(each.compared_keys for each in regions if each.region == region))
    return tuple(
        key for each in regions if each.region != region for key in each.witnesses if key.public not in own
    )


class Covered(NamedTuple):
    """How far a log is cosigned as it is asked for."""

    size: int
    """leaves of the largest checkpoint that is; 0 where none is"""
    missing: str
    """why none is, as a sentence for a person; empty where one is, or nobody's cosignature is asked for"""


@dataclass(frozen=True, slots=True)
class LogTrust:
    """What one log verifies under: its own keys, and the witnesses that count for it.

    - the keys are of the region that the origin names;
    - no witness is of that region, nor has any of that region's keys under another name that people compared;
    - no key cosigns a checkpoint that it signed as the log's. That a region names a key as a log's, which it does by itself, is no proof that
      it has it, and takes nobody's cosignature away.
    """

    origin: Origin
    keys: tuple[VerifierKey, ...]
    witnesses: Mapping[VerifierKey, str]
    """who stands behind each witness's key: a region, or an outside witness by its name, which is never a region's"""
    policy: WitnessPolicy | None = None
    """which witnesses are a quorum; without one, they are counted"""
    unlisted: tuple[VerifierKey, ...] = ()
    """further keys that the bundle names for the log, and the policy does not list"""
    of_regions: Mapping[VerifierKey, str] = field(default_factory=dict)
    """the other regions' own witnesses, by region: what they cosigned their region has seen, also where a policy counts others alone"""
    size_min: int = 0
    """leaves that the log had at least, by its own region's bundle (`RegionTrust.named_sizes`): one with fewer is of before"""

    @property
    def region(self) -> str:
        """Whose log it is."""
        return self.origin.region

    @property
    def name(self) -> str:
        """The origin as the checkpoint states it."""
        return self.keys[0].name

    def open(self, data: bytes) -> SignedCheckpoint:
        """Read and verify a checkpoint of this log; it has only cosignatures that count, and the regions that have seen it. Raises TamperError."""
        opened = open_checkpoint(data, self.keys, dict.fromkeys((*self.witnesses, *self.of_regions)))
        own = {by.key.public for by in opened.signed}
        cosigned = tuple(by for by in opened.cosigned if by.key.public not in own)
        seen_by = {self.of_regions[by.key] for by in cosigned if by.key in self.of_regions}
        return opened._replace(
            cosigned=tuple(by for by in cosigned if by.key in self.witnesses),
            seen_by=tuple(sorted(seen_by)),
        )

    def open_kept(self, data: bytes) -> SignedCheckpoint:
        """As `open`, for a note that was kept or is remembered besides the log's checkpoint. One that none of the keys asked for signed, but another that the bundle
        names for the log, counts for nothing: it is given without signatures and cosignatures. What it says of the tree is to be compared."""
        try:
            return self.open(data)
        except TamperError:
            if not self.unlisted:
                raise
            refused = open_checkpoint(data, (*self.keys, *self.unlisted), self.witnesses)
            return refused._replace(signed=(), cosigned=())

    def cosigners(self, cosigned: Iterable[Verified]) -> tuple[str, ...]:
        """Who cosigned, each once, sorted: regions and outside witnesses. A key counts for one of them only."""
        found: dict[bytes, str] = {}
        for by in cosigned:
            if by.key in self.witnesses:
                found.setdefault(by.key.public, self.witnesses[by.key])
        return tuple(sorted(set(found.values())))

    def missing(self, cosigned: Iterable[Verified], cosignatures_min: int) -> str:
        """Why these cosignatures of one checkpoint are not enough, for a person; empty where they are. A policy, where
        there is one, takes the place of the number."""
        cosigned = tuple(cosigned)
        if self.policy is not None:
            return self.policy.missing(by.key for by in cosigned if by.key in self.witnesses)
        number = len(self.cosigners(cosigned))
        if number >= cosignatures_min:
            return ""
        return (
            f"{number} trusted regions or witnesses other than {self.region} cosigned it, {cosignatures_min} are "
            "required"
        )

    def covered(self, checkpoints: Iterable[SignedCheckpoint], cosignatures_min: int) -> Covered:
        """How far these checkpoints of the log are cosigned as required, each judged by itself. Where no cosignature is required, how far
        anybody cosigned. One of no leaves covers none, where others have some; nor does one that counts for nothing (`open_kept`)."""
        known = tuple(signed for signed in checkpoints if signed.signed)
        has_leaves = any(signed.checkpoint.size for signed in known)
        size, closest, most = -1, "", -1
        for signed in known:
            if has_leaves and not signed.checkpoint.size:
                continue
            missing, number = (
                self.missing(signed.cosigned, max(1, cosignatures_min)),
                len(self.cosigners(signed.cosigned)),
            )
            if not missing:
                size = max(size, signed.checkpoint.size)
            elif number > most:
                closest, most = missing, number
        if size >= 0 or (self.policy is None and cosignatures_min < 1):
            return Covered(max(size, 0), "")
        wanted = "is cosigned as required" if self.policy is None else "has a quorum"
        return Covered(0, f"No checkpoint of {self.name} {wanted}: {closest}.")


class Trust:
    """The regions, and outside witnesses, that somebody trusts. An empty one trusts nobody."""

    __slots__ = ("_outside", "_policy", "_regions")

    def __init__(
        self,
        regions: Iterable[RegionTrust] = (),
        outside: Iterable[VerifierKey] = (),
        policy: WitnessPolicy | None = None,
    ) -> None:
        """`outside`: keys of witnesses that belong to no region. `policy`: a tlog-policy; its witnesses count and no
        others, its quorum is asked for, and the logs that it lists, if it lists any, are the only ones. Raises
        RequestError where two bundles of one region differ, an outside witness is called like something of a trusted
        region, or two parties have the key of one witness."""
        self._policy = policy
        self._regions: dict[str, RegionTrust] = {}
        for region in regions:
            held = self._regions.setdefault(region.region, region)
            if held.bundle != region.bundle:
                raise RequestError(
                    f"Two different bundles of {region.region} are given.",
                    code=Code.CONFLICT,
                    hint="Give the newest one, whose fingerprint you compared.",
                )
        self._outside = tuple(dict.fromkeys(outside))
        domains = {trust_domain(region.region, region.mesh) for region in self._regions.values()}
        for key in self._outside:
            if key.name.partition("/")[0] in domains:
                raise RequestError(
                    f"The outside witness {key.name} is called like one of a trusted region.",
                    hint="A region's witness key comes in its bundle.",
                )
        check_cosigner_keys(self._regions.values(), self._outside)

    @classmethod
    def of(cls, bundles: Iterable[RegionBundle], outside: Iterable[VerifierKey] = ()) -> Trust:
        """Trust in these regions. Raises as the constructor does."""
        return cls(map(RegionTrust, bundles), outside)

    def under(self, policy: WitnessPolicy) -> Trust:
        """The same regions, judged by this policy."""
        return Trust(self._regions.values(), self._outside, policy)

    @property
    def policy(self) -> WitnessPolicy | None:
        """What quorum is asked for, where a policy says so."""
        return self._policy

    @property
    def regions(self) -> tuple[str, ...]:
        """The trusted regions' names, sorted."""
        return tuple(sorted(self._regions))

    def find(self, region: str) -> RegionTrust | None:
        """The region's keys, or None where no bundle of it is trusted."""
        return self._regions.get(region)

    def region(self, region: str) -> RegionTrust:
        """The region's keys. Raises TamperError where no bundle of it is trusted: nothing it says can be verified."""
        found = self._regions.get(region)
        if found is None:
            raise TamperError(
                f"No bundle of {region[:200]!r} is trusted, so nothing that it says can be verified.",
                hint="Give that region's bundle.",
            )
        return found

    def log(self, origin: str) -> LogTrust:
        """What the log of this name verifies under. Raises TamperError where its region is not trusted."""
        parsed = Origin.parse(origin)
        own = self.region(parsed.region)
        if own.mesh != parsed.mesh:
            raise TamperError(f"{origin!r} is no log of {trust_domain(own.region, own.mesh)}.")
        keys = self._listed(origin, own.log_keys(origin))
        unlisted = tuple(key for key in own.log_keys(origin) if key not in keys)
        return LogTrust(
            parsed,
            keys,
            self.witnesses_for(parsed.region),
            self._policy,
            unlisted,
            self._witnesses_of_others(parsed.region),
            max(own.named_sizes(origin), default=0),
        )

    def _listed(self, origin: str, keys: tuple[VerifierKey, ...]) -> tuple[VerifierKey, ...]:
        """Of the log's keys, those that the policy lists. It can list a public key once, so the name there does not count: another region may
        have named this key as a log's of its own, and only the bundle of this log's region says whose log it signs."""
        if self._policy is None or not self._policy.logs:
            return keys
        held = {(key.algorithm, key.public) for key in self._policy.log_keys}
        listed = tuple(key for key in keys if (key.algorithm, key.public) in held)
        if not listed:
            named = any(key.name == origin for key in self._policy.log_keys)
            raise TamperError(
                f"The policy lists the log {origin} under a key that its region's bundle does not name."
                if named
                else f"The policy does not list the log {origin}.",
                hint="A log must be named by its region's bundle and by the policy.",
            )
        return listed

    def log_of(self, checkpoint: bytes) -> LogTrust:
        """What the log verifies under that this checkpoint says it is of. Raises TamperError."""
        return self.log(parse_note(checkpoint).text.partition("\n")[0])

    def witnesses_for(self, region: str) -> dict[VerifierKey, str]:
        """The witnesses that count for this region's logs, and who stands behind each."""
        own = self._regions.get(region)
        held = frozenset[bytes]() if own is None else own.compared_keys
        found = self._witnesses_of_others(region) | {key: self._party(key) for key in self._outside}
        if self._policy is not None:
            domain = "" if own is None else f"{trust_domain(own.region, own.mesh)}/"
            found = {
                key: found.get(key) or self._party(key)
                for key in self._policy.witness_keys
                if own is None or not key.name.startswith(domain)
            }
        return {key: party for key, party in found.items() if key.public not in held}

    def _witnesses_of_others(self, region: str) -> dict[VerifierKey, str]:
        """The witnesses of all regions but this one, by region; none has a key of this region that people compared."""
        own = self._regions.get(region)
        held = frozenset[bytes]() if own is None else own.compared_keys
        return {
            key: other.region
            for other in self._regions.values()
            if other.region != region
            for key in other.witnesses
            if key.public not in held
        }

    def _party(self, key: VerifierKey) -> str:
        """Who stands behind a key that no region calls its witness's: a region where it is that one's for something else that people compared."""
        of = next((name for name in self.regions if key.public in self._regions[name].compared_keys), None)
        if of is not None:
            return of
        # Whoever runs a witness chooses its name. Called like a region it is not that region, for which rules ask by name (audit.keys_in_log).
        called = key.name.partition("/")[0]
        is_like_one = any(
            called in (each.region, trust_domain(each.region, each.mesh)) for each in self._regions.values()
        )
        return f"outside witness {key.name}" if is_like_one else key.name

    def endings(self, origin: str) -> tuple[Ending, ...]:
        """The former keys of all regions that ended in this log."""
        return tuple(ending for region in self._regions.values() for ending in region.endings(origin))

    def former_policy_keys(self, region: str) -> tuple[bytes, ...]:
        """A region's policy keys that ended, wherever; none where it is not trusted."""
        found = self._regions.get(region)
        former = () if found is None else found.bundle.former
        return tuple(public for keys in former for public in keys.policy_keys)

    def policy_eras(self, region: str) -> dict[str, int]:
        """A region's policy keys by their ids, each with how many times keys had ended before it did, or, of one of now, have by now."""
        found = self._regions.get(region)
        if found is None:
            return {}
        ended = [keys.policy_keys for keys in found.bundle.former if keys.policy_keys]
        return {
            key_id(public): era
            for era, publics in enumerate((*ended, found.policy_keys))
            for public in publics
        }

    def former_receipt_keys(self, region: str) -> tuple[bytes, ...]:
        """The same of its receipt keys."""
        found = self._regions.get(region)
        former = () if found is None else found.bundle.former
        return tuple(public for keys in former for public in keys.receipt_keys)

    @property
    def policy_keys(self) -> dict[str, tuple[bytes, ...]]:
        """Policy keys of now by region, as `policy.signed.verify` asks for them."""
        return {name: region.policy_keys for name, region in self._regions.items()}

    @property
    def anchors(self) -> TrustBundle:
        """The roots of the trusted regions, for chains of certificates."""
        return TrustBundle(region.anchor for region in self._regions.values())

    def encode(self) -> str:
        """As one line of JSON, for a process that shall trust the same. The policy is not in it: whoever hands this over
        has judged checkpoints by it."""
        bundles = [self._regions[name].bundle for name in self.regions]
        return msgspec.json.encode(_Encoded(bundles, [str(key) for key in self._outside])).decode()

    @classmethod
    def decode(cls, text: str) -> Trust:
        """What `encode` gave. The bundles' signatures are not in it: the text is as trusted as whoever hands it
        over. Raises RequestError."""
        try:
            encoded = msgspec.json.decode(text, type=_Encoded)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestError(f"This is not what `Trust.encode` writes: {error}.") from error
        return cls.of(encoded.bundles, map(VerifierKey.parse, encoded.outside))


class _Encoded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bundles: list[RegionBundle]
    outside: list[str]
