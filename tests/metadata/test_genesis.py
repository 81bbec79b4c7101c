"""A metadata store belongs to one region, and a broker of another one finds out before it does anything."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from felix.errors import Code, CorruptionError, RequestError
from keys.signing import SigningKey
from region.metadata.embedded import EmbeddedStore
from region.metadata.genesis import OWNER_KEY, Genesis, claim_or_verify, sign_genesis
from region.metadata.memory import MemoryStore
from region.metadata.transaction import Delete, Put

US_SIGNS, EU_SIGNS = (SigningKey.from_seed(bytes([n] * 32)) for n in (1, 2))
US_KEY, EU_KEY = US_SIGNS.verify_key, EU_SIGNS.verify_key
US = sign_genesis("us-east", "acme", "AA" * 32, 1_700_000_000_000, US_SIGNS)
EU = sign_genesis("eu-west", "acme", "bb" * 32, 1_700_000_000_000, EU_SIGNS)


async def test_the_first_broker_claims_and_the_next_ones_verify() -> None:
    store = MemoryStore()
    assert await claim_or_verify(store, US, US_KEY) == US
    revision = (await store.range("")).revision
    later = sign_genesis("us-east", "acme", "aa" * 32, 1_800_000_000_000, US_SIGNS)
    assert await claim_or_verify(store, later, US_KEY) == US, "the record in the store is the older one"
    assert (await store.range("")).revision == revision, "verifying writes nothing"


async def test_another_regions_broker_is_refused_by_name(tmp_path: Path) -> None:
    async with await EmbeddedStore.open(tmp_path / "metadata.db") as store:
        await claim_or_verify(store, US, US_KEY)
        before = await store.load("")
        with pytest.raises(RequestError) as caught:
            await claim_or_verify(store, EU, EU_KEY)
        assert caught.value.code is Code.WRONG_REGION
        assert "belongs to region us-east; this broker belongs to eu-west" in caught.value.sentence
        assert await store.load("") == before


async def test_of_two_regions_that_claim_at_once_one_gets_the_store() -> None:
    store = MemoryStore()
    outcomes = await asyncio.gather(
        claim_or_verify(store, US, US_KEY), claim_or_verify(store, EU, EU_KEY), return_exceptions=True
    )
    won = [outcome for outcome in outcomes if isinstance(outcome, Genesis)]
    lost = [outcome for outcome in outcomes if isinstance(outcome, RequestError)]
    assert len(won) == len(lost) == 1 and lost[0].code is Code.WRONG_REGION
    assert won[0].region in lost[0].sentence


@pytest.mark.parametrize("other", ["eu-west", "us-east0", "us-east-2", "us-eas", "a", "zz"])
async def test_keys_of_another_region_are_found_wherever_they_sort(other: str) -> None:
    store = MemoryStore()
    for name in ("streams/a/b/c", "rights/x"):
        await store.transact([], [Put(f"/felix/1/us-east/{name}", b"{}")])
    await store.transact([], [Put(f"/felix/1/{other}/streams/a/b/c", b"{}")])
    with pytest.raises(RequestError, match=f"belongs to region {other}") as caught:
        await claim_or_verify(store, US, US_KEY)
    assert caught.value.code is Code.WRONG_REGION
    assert await store.get(OWNER_KEY) is None


async def test_a_region_of_the_same_name_but_another_authority_or_mesh_is_another_region() -> None:
    store = MemoryStore()
    await claim_or_verify(store, US, US_KEY)
    namesake = sign_genesis("us-east", "acme", "cc" * 32, 1, US_SIGNS)
    with pytest.raises(RequestError, match="another region that is also called us-east") as caught:
        await claim_or_verify(store, namesake, US_KEY)
    assert caught.value.code is Code.WRONG_REGION
    with pytest.raises(RequestError, match="of mesh acme; this broker belongs to mesh initech") as caught:
        await claim_or_verify(store, sign_genesis("us-east", "initech", "aa" * 32, 1, US_SIGNS), US_KEY)
    assert caught.value.code is Code.WRONG_REGION


async def test_a_forged_a_damaged_and_a_missing_record_are_told_apart() -> None:
    key = "/felix/1/us-east/genesis"
    store = MemoryStore()
    await claim_or_verify(store, US, US_KEY)
    forged = msgspec.structs.replace(US, created_ms=1)
    await store.transact([], [Put(key, msgspec.json.encode(forged))])
    with pytest.raises(CorruptionError, match="not signed with the region's key") as caught:
        await claim_or_verify(store, US, US_KEY)
    assert caught.value.code is Code.TAMPERED
    await store.transact([], [Put(key, b"{")])
    with pytest.raises(CorruptionError, match="cannot be read"):
        await claim_or_verify(store, US, US_KEY)
    await store.transact([], [Delete(key)])
    with pytest.raises(CorruptionError, match="has no genesis record"):
        await claim_or_verify(store, US, US_KEY)
    with pytest.raises(CorruptionError, match="this region's state folder"):
        await claim_or_verify(store, forged, US_KEY)


async def test_a_record_without_owner_mark_is_verified_before_it_is_marked() -> None:
    store = MemoryStore()
    forged = msgspec.structs.replace(US, created_ms=1)
    await store.transact([], [Put("/felix/1/us-east/genesis", msgspec.json.encode(forged))])
    with pytest.raises(CorruptionError):
        await claim_or_verify(store, US, US_KEY)
    await store.transact([], [Put("/felix/1/us-east/genesis", msgspec.json.encode(US))])
    assert await claim_or_verify(store, US, US_KEY) == US
    owner = await store.get(OWNER_KEY)
    assert owner is not None and owner.value == b"us-east"
