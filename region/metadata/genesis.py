"""The genesis record: which region a metadata store belongs to, signed with that region's Ed25519 key.

A broker calls `claim_or_verify` before anything else it does with a store. A store belongs to one region; a
broker of another region refuses it, so that a wrong endpoint in a configuration file can never join two
regions' metadata.

Keys: `/felix/1/owner` (the region's name, so that two regions cannot both claim a fresh store) and
`/felix/1/<region>/genesis`. Signed for the purpose `genesis`: the JSON of the record without its signature, fields
in order of name, no spaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from felix.errors import Code, CorruptionError, RequestError
from felix.names import parse_region
from keys.signing import SigningKey, VerifyKey
from region.metadata.port import MetadataStore, OutcomeUnknownError
from region.metadata.transaction import Absent, Entry, Put

ROOT: Final = "/felix/1/"
OWNER_KEY: Final = ROOT + "owner"
_PURPOSE: Final = "genesis"
_CLAIMS_MAX: Final = 3
"""Tries to claim, where the answer to one was lost or another broker of this region came first."""


class Genesis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A region's birth certificate. `authority_fingerprint`: SHA-256 of its root certificate, lower-case hex.
    `created_ms`: ms since the Unix epoch. `signature`: Ed25519, 64 bytes."""

    region: str
    mesh: str
    authority_fingerprint: str
    created_ms: int
    signature: bytes

    def signed_bytes(self) -> bytes:
        """The message that the signature covers."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "signature"}
        return msgspec.json.encode(fields, order="sorted")


def region_prefix(region: str) -> str:
    """`/felix/1/<region>/`: everything of a region except the store's owner mark."""
    return f"{ROOT}{parse_region(region)}/"


def sign_genesis(
    region: str, mesh: str, authority_fingerprint: str, created_ms: int, key: SigningKey
) -> Genesis:
    """The signed record of a new region. Raises RequestError(NAME_INVALID) for names that are none."""
    unsigned = Genesis(
        parse_region(region), parse_region(mesh), authority_fingerprint.lower(), created_ms, b""
    )
    return msgspec.structs.replace(unsigned, signature=key.sign(_PURPOSE, unsigned.signed_bytes()))


def verify_genesis(genesis: Genesis, keys: Sequence[VerifyKey], where: str) -> None:
    """Raises CorruptionError(TAMPERED) unless one of `keys` signed it. `where`: the record's place, for the sentence."""
    if not any(key.holds(_PURPOSE, genesis.signed_bytes(), genesis.signature) for key in keys):
        raise CorruptionError(
            f"The genesis record of region {genesis.region} in {where} is not signed with the region's key.",
            code=Code.TAMPERED,
            hint="Find out who wrote it before any broker uses this store.",
        )


async def claim_or_verify(
    store: MetadataStore, genesis: Genesis, key: VerifyKey, earlier: Sequence[VerifyKey] = ()
) -> Genesis:
    """Make a fresh store this region's, or check that it already is. Answers the record in the store. `earlier`: the region's keys
    before `key`, one of which may have signed the record there.

    1. our own record is signed with our region's key;
    2. the store's owner mark is absent or names our region;
    3. where it is absent, no other region has a record in the store; then we claim it;
    4. the record there names our region, our mesh and our authority;
    5. it is signed with our region's key, or one that it had before.

    Raises RequestError(WRONG_REGION) with the name of the region that it belongs to, CorruptionError where the
    record is damaged, forged or missing although the store was claimed.
    """
    keys = (key, *earlier)
    verify_genesis(genesis, keys, "this region's state folder")
    record_key = region_prefix(genesis.region) + "genesis"
    for _ in range(_CLAIMS_MAX):
        owner = await store.get(OWNER_KEY)
        if owner is not None:
            break
        await _refuse_other_regions(store, genesis)
        found = await store.get(record_key)
        writes = [Put(OWNER_KEY, genesis.region.encode())]
        if found is None:
            compares = [Absent(OWNER_KEY), Absent(record_key)]
            writes.append(Put(record_key, msgspec.json.encode(genesis)))
        else:
            _check(_decode(found, store), genesis, keys, store)
            compares = [Absent(OWNER_KEY)]
        try:
            await store.transact(compares, writes)
        except OutcomeUnknownError:
            continue
    else:
        owner = await store.get(OWNER_KEY)
    if owner is None or owner.value != genesis.region.encode():
        raise _wrong_region(genesis, "nobody" if owner is None else _text(owner), store)
    found = await store.get(record_key)
    if found is None:
        raise CorruptionError(
            f"The metadata store {store.where} is marked as region {genesis.region}'s but has no genesis record.",
            hint="Metadata was lost: put back a backup (docs/metadata.md). The data of streams is not touched.",
        )
    there = _decode(found, store)
    _check(there, genesis, keys, store)
    return there


async def _refuse_other_regions(store: MetadataStore, genesis: Genesis) -> None:
    """Look at each region that has keys in the store, skipping from one to the next."""
    after = ROOT
    while True:
        page = await store.range(ROOT, limit=1, after=after)
        if not page.entries:
            return
        region = page.entries[0].key.removeprefix(ROOT).split("/")[0]
        if region not in (genesis.region, "owner"):
            raise _wrong_region(genesis, region, store)
        after = f"{ROOT}{region}0"  # "0" sorts right after "/": past everything of this region


def _check(there: Genesis, ours: Genesis, keys: Sequence[VerifyKey], store: MetadataStore) -> None:
    if there.region != ours.region:
        raise _wrong_region(ours, there.region, store)
    if there.mesh != ours.mesh:
        raise RequestError(
            f"The metadata store {store.where} belongs to region {there.region} of mesh {there.mesh}; "
            f"this broker belongs to mesh {ours.mesh}.",
            code=Code.WRONG_REGION,
            hint=_HINT,
        )
    if there.authority_fingerprint != ours.authority_fingerprint:
        raise RequestError(
            f"The metadata store {store.where} belongs to another region that is also called {there.region}: its "
            f"authority is {there.authority_fingerprint[:16]}…, this broker's is {ours.authority_fingerprint[:16]}….",
            code=Code.WRONG_REGION,
            hint=_HINT,
        )
    verify_genesis(there, keys, f"the metadata store {store.where}")


_HINT: Final = (
    "Each region needs a metadata store of its own: check the endpoints or the path in region.yaml."
)


def _wrong_region(ours: Genesis, theirs: str, store: MetadataStore) -> RequestError:
    return RequestError(
        f"The metadata store {store.where} belongs to region {theirs}; this broker belongs to {ours.region}.",
        code=Code.WRONG_REGION,
        hint=_HINT,
    )


def _text(entry: Entry) -> str:
    return entry.value[:64].decode(errors="replace")


def _decode(entry: Entry, store: MetadataStore) -> Genesis:
    try:
        return msgspec.json.decode(entry.value, type=Genesis)
    except msgspec.MsgspecError as error:
        raise CorruptionError(
            f"The genesis record {entry.key} in {store.where} cannot be read: {error}.",
            hint="Put back a backup (docs/metadata.md).",
        ) from error
