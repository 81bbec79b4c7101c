"""What a broker without a copy of the audit log hears of its region's keys, by the metadata store: who can write a note, and what one of before does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from region_home import make_region, running

from felix.errors import RequestError, TamperError
from felix.runtime.real import now_ms
from keys.bundle import FormerKeys, RegionBundle, decode_bundle
from keys.key_file import load_signing_key
from keys.signing import SigningKey
from region.config import load_config
from region.folder import RegionFolder
from region.metadata.catalog import Catalog
from region.metadata.memory import MemoryStore
from region.trust.key_note_store import note_given_up
from region.trust.log_keys import change_log_keys
from region.trust.signing_key_leaves import (
    ENDED_MAX,
    LoggedKey,
    LoggedKeys,
    given_up,
    joined,
    key_id_of,
    stale_key,
)
from region.trust.signing_key_note import NOTE_BYTES_MAX, SigningKeyNote, decode_note
from region.trust.signing_keys import change_signing_keys


@pytest.fixture
def folder(tmp_path: Path) -> RegionFolder:
    return make_region(tmp_path, "us-east")


def own_of(folder: RegionFolder) -> RegionBundle:
    return decode_bundle(folder.bundle.read_bytes()).bundle


def changed(own: RegionBundle) -> RegionBundle:
    former = (*own.former, FormerKeys(policy_keys=own.policy_keys))
    return msgspec.structs.replace(
        own.with_former(former), policy_keys=(SigningKey.generate().verify_key.public,)
    )


def logged(*bundles: RegionBundle) -> LoggedKeys:
    """What a log says of the policy keys of these bundles, each of which took the place of the one before."""
    ids = [key_id_of(bundle.policy_keys[0]) for bundle in bundles]
    return {"policy": LoggedKey(ids[-1], 1_700_000_000_000, tuple(ids[:-1]))}


def test_a_note_that_the_logs_key_signed_comes_back_as_it_was(folder: RegionFolder) -> None:
    own, key = own_of(folder), load_signing_key(folder.audit_key)
    note = SigningKeyNote.sign(own, logged(own, changed(own)), key)
    assert decode_note(note.encode(), own) == note
    assert len(note.encode()) <= NOTE_BYTES_MAX


def test_no_other_key_than_the_logs_own_of_now_signs_a_note(folder: RegionFolder) -> None:
    own = own_of(folder)
    said = logged(own, changed(own))
    for key in (
        SigningKey.generate(),
        load_signing_key(folder.policy_key),
        load_signing_key(folder.receipt_key),
        load_signing_key(folder.witness_key),
    ):
        with pytest.raises(TamperError, match="signs the audit log"):
            decode_note(SigningKeyNote.sign(own, said, key).encode(), own)
    former = load_signing_key(folder.audit_key)
    ended = msgspec.structs.replace(
        own,
        audit_keys=tuple(
            msgspec.structs.replace(key, to_size=7) if key.public == former.verify_key.public else key
            for key in own.audit_keys
        ),
    )
    with pytest.raises(TamperError, match="signs the audit log"):
        decode_note(SigningKeyNote.sign(own, said, former).encode(), ended)


def test_a_note_with_one_field_changed_or_of_another_region_is_not_believed(folder: RegionFolder) -> None:
    own, key = own_of(folder), load_signing_key(folder.audit_key)
    note = SigningKeyNote.sign(own, logged(own, changed(own)), key)
    for forged in (
        msgspec.structs.replace(note, keys=logged(changed(own), own)),
        msgspec.structs.replace(note, keys={}),
        msgspec.structs.replace(note, region="eu-west"),
        msgspec.structs.replace(note, mesh="other"),
        msgspec.structs.replace(note, signature=b""),
    ):
        with pytest.raises((TamperError, RequestError)):
            decode_note(forged.encode(), own)
    late = {"policy": LoggedKey(b"k" * 16, 1 << 60)}
    for no_key in (
        LoggedKey(b"k" * 15, 1),
        LoggedKey(b"k" * 16, 1, (b"",)),
        LoggedKey(b"k" * 16, 1, (b"k" * 90_000,)),
        LoggedKey(b"k" * 16, 1, tuple(at.to_bytes(16) for at in range(ENDED_MAX + 1))),
    ):
        with pytest.raises(RequestError, match="no key"):
            decode_note(SigningKeyNote.sign(own, {"policy": no_key}, key).encode(), own)
    for data in (
        b"",
        b"\xff",
        b"[]",
        note.encode()[:-1],
        b" " * (NOTE_BYTES_MAX + 1),
        SigningKeyNote.sign(own, late, key).encode(),  # type: ignore[arg-type]
    ):
        with pytest.raises(RequestError):
            decode_note(data, own)


def test_no_note_of_before_stops_a_broker_with_the_keys_of_now(folder: RegionFolder) -> None:
    """Also not where the bundle names the keys of earlier changes no more."""
    bundles = [own_of(folder)]
    for _ in range(5):
        bundles.append(changed(bundles[-1]))
    now = bundles[-1]
    for dropped in range(len(now.former) + 1):
        mine = now.with_former(now.former[dropped:])
        for size in range(2, len(bundles) + 1):
            assert not given_up(mine, logged(*bundles[:size]))
    for earlier in bundles[:-1]:
        assert "gave up the policy key" in given_up(earlier, logged(*bundles))
    skips = changed(bundles[0])
    assert not given_up(skips, logged(*bundles)) and stale_key(skips, logged(*bundles))


def test_what_a_note_says_was_given_up_is_not_lost_with_the_log_and_joining_twice_changes_nothing(
    folder: RegionFolder,
) -> None:
    first = own_of(folder)
    second = changed(first)
    third = changed(second)
    whole, short = logged(first, second, third), logged(first, second)
    assert joined(whole, {}) == joined(whole, short) == joined({}, whole) == whole
    held = joined(short, whole)
    assert held["policy"].key_id == key_id_of(second.policy_keys[0])
    assert set(held["policy"].ended) == set(whole["policy"].ended)
    assert joined(short, held) == held


async def test_what_a_change_gave_up_is_noted_in_the_store_beside_what_stands_there(
    folder: RegionFolder,
) -> None:
    first, key = own_of(folder), load_signing_key(folder.audit_key)
    second = changed(first)
    third = changed(second)
    catalog = Catalog(MemoryStore(), "us-east")

    async def noted() -> LoggedKeys:
        entry = await catalog.store.get(catalog.keys.signing_keys())
        assert entry is not None
        return decode_note(entry.value, third).keys

    assert not await note_given_up(catalog, first, key, 1), "no key was changed"
    assert await catalog.store.get(catalog.keys.signing_keys()) is None
    for bundle in (second, third):
        assert await note_given_up(catalog, bundle, key, 2)
        assert not await note_given_up(catalog, bundle, key, 3), "it says so already"
    assert {"policy": (await noted())["policy"]} == {
        "policy": LoggedKey(
            key_id_of(third.policy_keys[0]),
            2,
            tuple(key_id_of(each.policy_keys[0]) for each in (first, second)),
        )
    }
    for earlier in (first, second):
        assert given_up(earlier, await noted())
    assert not given_up(third, await noted())

    # What stands there and holds for nobody gives way.
    entry = await catalog.store.get(catalog.keys.signing_keys())
    assert entry is not None
    forged = SigningKeyNote.sign(third, logged(third, first), SigningKey.generate())
    await catalog.put_signing_keys(forged.encode(), revision=entry.mod_revision)
    assert await note_given_up(catalog, third, key, 4)
    assert given_up(second, await noted()) and not given_up(third, await noted())


async def test_a_note_of_a_change_that_the_bundle_is_of_before_is_said_and_stays(
    folder: RegionFolder,
) -> None:
    """Of a second change from a folder of before the first; or of somebody who has the log's key."""
    own, key = own_of(folder), load_signing_key(folder.audit_key)
    catalog = Catalog(MemoryStore(), own.region)
    assert await note_given_up(catalog, changed(own), key, 1)
    entry = await catalog.store.get(catalog.keys.signing_keys())
    with pytest.raises(RequestError, match="of before") as refused:
        await note_given_up(catalog, changed(own), key, 2)
    assert refused.value.hint and await catalog.store.get(catalog.keys.signing_keys()) == entry


def test_nothing_of_another_regions_note_is_repeated(folder: RegionFolder) -> None:
    """It is anybody's who can write the store, and of any length."""
    own = own_of(folder)
    note = SigningKeyNote(region="\x1b[2J" + "x" * 30_000, mesh="m", keys={})
    with pytest.raises(RequestError, match="of another region") as refused:
        decode_note(note.encode(), own)
    assert len(refused.value.sentence) < 100


async def test_who_has_the_logs_key_and_the_store_stops_a_region_until_the_log_has_another_key(
    folder: RegionFolder,
) -> None:
    """Other signing keys help until he names those: bundles are public. No note counts that the log's key of before signed."""
    thief, config = load_signing_key(folder.audit_key), load_config(folder.config)

    async def write_note() -> bool:
        """Whether the broker that runs ends by it."""
        own = own_of(folder)
        said: LoggedKeys = {"policy": LoggedKey(b"x" * 16, 5, (key_id_of(own.policy_keys[0]),))}
        async with running(folder) as node:
            catalog, governance = node.broker.catalog, node.services.governance
            held = await catalog.store.get(catalog.keys.signing_keys())
            written = SigningKeyNote.sign(own, said, thief).encode()
            await catalog.put_signing_keys(written, revision=0 if held is None else held.mod_revision)

            async def is_gone() -> bool:
                now = await catalog.store.get(catalog.keys.signing_keys())
                return now is None or now.value != written

            for _ in range(600):
                if governance.keys_over() is not None or await is_gone():
                    break
                await asyncio.sleep(0.05)
            return governance.keys_over() is not None

    assert await write_note()
    change_signing_keys(folder, config, now_ms())
    assert await write_note(), "it names the new one"
    with pytest.raises(RequestError, match="gave up the policy key") as refused:
        await running(folder).__aenter__()
    assert "felix region change-log-keys" in refused.value.hint
    change_log_keys(folder, config, now_ms())
    assert not await write_note()
