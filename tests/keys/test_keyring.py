"""The keyring: writing, reading, rotating, destroying, crashing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from runtimes import with_wall

from felix import files
from felix.batch import Batch, NewRecord, encode_batch
from felix.errors import Code, CorruptionError, FelixError, RequestError, TamperError
from felix.names import StreamName
from keys import keyring as keyring_module
from keys.envelope import DATA_KEY_AGE_MS_MAX, BatchSealer, open_batch
from keys.errors import KeyDestroyedError, KeyProviderError, KeyScopeError, KeyUnknownError
from keys.hierarchy import DataEntry, KeyState, decode_entry, encode_entry
from keys.key_id import KeyKind, new_key_id
from keys.keyring import Keyring, ShardSealer, create_keyring, open_keyring
from keys.provider import MemoryKeyProvider
from keys.store import KEY_FILE, KeyStore

ORDERS = StreamName.parse("acme/payments/orders")
CARDS = StreamName.parse("acme/payments/cards")
LIFE = b"i" * 16


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_keyring(tmp_path / "keys", "us-east")
    return tmp_path / "keys"


@pytest.fixture
def ring(folder: Path, clock: Clock) -> Iterator[Keyring]:
    ring = open_keyring(folder, "us-east", runtime=with_wall(clock))
    yield ring
    ring.close()


def batch(payload: bytes = b"payload", base_offset: int = 0, shard: int = 0, epoch: int = 1) -> Batch:
    made = encode_batch([NewRecord(payload)], shard=shard)
    return made.with_header(replace(made.header, base_offset=base_offset, leader_epoch=epoch))


def reopened(folder: Path) -> Keyring:
    return open_keyring(folder, "us-east")


# -- writing and reading -------------------------------------------------------------------------------


def test_what_one_process_sealed_the_next_one_opens(folder: Path) -> None:
    ring = reopened(folder)
    sealed = ring.sealer(ORDERS, LIFE, 0, 1).seal(batch())
    ring.close()
    ring = reopened(folder)
    key = ring.data_key(sealed.header.key_id)
    assert (key.stream, key.incarnation, key.shard, key.epoch) == (ORDERS, LIFE, 0, 1)
    assert open_batch(key, sealed) == batch()
    with pytest.raises(KeyScopeError, match="earlier process"):
        BatchSealer(key)
    ring.close()


def test_a_data_key_is_durable_before_it_is_given_out(ring: Keyring, folder: Path) -> None:
    key = ring.data_key_for_writing(ORDERS, LIFE, 0, 1)
    assert key.key_id in (folder / KEY_FILE).read_bytes()
    assert key.secret not in (folder / KEY_FILE).read_bytes()


def test_every_request_for_writing_gives_a_fresh_key(ring: Keyring) -> None:
    keys = [ring.data_key_for_writing(ORDERS, LIFE, 0, 1) for _ in range(5)]
    assert len({key.key_id for key in keys}) == len({key.secret for key in keys}) == 5


def test_a_sealer_makes_no_key_before_its_first_batch_and_one_for_many(ring: Keyring, clock: Clock) -> None:
    sealer = ring.sealer(ORDERS, LIFE, 0, 1)
    assert sealer.data_key() is None
    assert [info.level for info in ring.list()] == ["root"]
    ids = {sealer.seal(batch(base_offset=n)).header.key_id for n in range(10)}
    assert len(ids) == 1
    current = sealer.data_key()
    assert current is not None
    assert current.key_id in ids
    clock.ms += DATA_KEY_AGE_MS_MAX
    assert sealer.seal(batch()).header.key_id not in ids


def test_keys_of_another_region_are_refused_before_any_cryptography(
    ring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("reached cryptography or the provider")

    monkeypatch.setattr(keyring_module, "unwrap", never)
    monkeypatch.setattr(ring, "_provider", None)
    monkeypatch.setattr(ring, "_tree", None)
    for key_id in (
        new_key_id("eu-west", KeyKind.DATA, b"r" * 11),
        new_key_id("us-east", KeyKind.TRANSFER, b"r" * 11),
    ):
        with pytest.raises(KeyScopeError) as caught:
            ring.data_key(key_id)
        assert caught.value.code is Code.KEY_SCOPE


def test_a_foreign_id_is_foreign_even_where_it_is_cached(ring: Keyring, tmp_path: Path) -> None:
    create_keyring(tmp_path / "eu", "eu-west")
    other = open_keyring(tmp_path / "eu", "eu-west")
    key = other.data_key_for_writing(ORDERS, LIFE, 0, 1)
    with pytest.raises(KeyScopeError, match="does not belong to region us-east"):
        ring.data_key(key.key_id)
    other.close()


def test_an_unknown_key_says_so(ring: Keyring) -> None:
    with pytest.raises(KeyUnknownError, match="older than the data") as caught:
        ring.data_key(new_key_id("us-east", KeyKind.DATA, b"r" * 11))
    assert caught.value.code is Code.KEY_UNKNOWN


def test_unwrapped_keys_in_memory_are_bounded(ring: Keyring) -> None:
    ring._data_keys.most = 4
    ring._stream_secrets.most = 2
    ids = [ring.data_key_for_writing(StreamName("a", "b", f"s{n}"), LIFE, 0, 1).key_id for n in range(10)]
    assert len(ring._data_keys) == 4
    assert len(ring._stream_secrets) == 2
    for key_id in ids:
        assert ring.data_key(key_id).key_id == key_id
    assert len(ring._data_keys) == 4
    assert len(ring._stream_secrets) == 2


@pytest.mark.parametrize("field", ["shard", "epoch", "commitment", "key_id"])
def test_a_wrapped_key_that_was_moved_or_swapped_in_the_file_is_refused(folder: Path, field: str) -> None:
    ring = reopened(folder)
    key = ring.data_key_for_writing(ORDERS, LIFE, 0, 1)
    ring.close()
    store = KeyStore(folder, "us-east")
    entries = [decode_entry(body) for body in store.bodies]
    entry = entries[-1]
    assert isinstance(entry, DataEntry)
    fields = {name: getattr(entry, name) for name in entry.__struct_fields__}
    fields[field] = {
        "shard": 1,
        "epoch": 2,
        "commitment": bytes(32),
        "key_id": new_key_id("us-east", KeyKind.DATA, b"x" * 11),
    }[field]
    moved = DataEntry(**fields)
    store.rewrite([encode_entry(e) for e in [*entries[:-1], moved]])
    store.close()
    ring = reopened(folder)
    with pytest.raises(TamperError):
        ring.data_key(moved.key_id)
    if field != "key_id":
        assert moved.key_id == key.key_id
    ring.close()


# -- rotating data keys --------------------------------------------------------------------------------


def test_rotating_data_keys_gives_the_next_batch_another_key_and_old_batches_stay_readable(
    ring: Keyring,
) -> None:
    orders, cards = ring.sealer(ORDERS, LIFE, 0, 1), ring.sealer(CARDS, LIFE, 0, 1)
    first = [sealer.seal(batch()) for sealer in (orders, cards)]
    assert ring.rotate_data(ORDERS) == 1
    second = [sealer.seal(batch()) for sealer in (orders, cards)]
    assert first[0].header.key_id != second[0].header.key_id
    assert first[1].header.key_id == second[1].header.key_id
    assert ring.rotate_data() == 2
    third = [sealer.seal(batch()) for sealer in (orders, cards)]
    assert second[1].header.key_id != third[1].header.key_id
    for sealed in first + second + third:
        assert open_batch(ring.data_key(sealed.header.key_id), sealed) == batch()


def test_rotation_while_another_thread_seals_loses_nothing_and_repeats_no_nonce(ring: Keyring) -> None:
    sealer = ring.sealer(ORDERS, LIFE, 0, 1)
    stop = threading.Event()
    rotated = threading.Semaphore(0)
    sealed: list[Batch] = []
    failures: list[BaseException] = []

    def write() -> None:
        try:
            while not stop.is_set() or len(sealed) < 50:
                sealed.append(sealer.seal(batch(base_offset=len(sealed))))
                rotated.release()
        except BaseException as error:
            failures.append(error)
            rotated.release()

    writer = threading.Thread(target=write)
    writer.start()
    for turn in range(20):
        assert rotated.acquire(timeout=30)
        if turn % 5 == 4:
            ring.rotate_root()
        ring.rotate_data(ORDERS)
        while rotated.acquire(blocking=False):
            pass
        # The second batch from here on surely began after the rotation.
        assert rotated.acquire(timeout=30) and rotated.acquire(timeout=30)
    stop.set()
    writer.join(30)
    assert not failures
    nonces = {(s.header.key_id, bytes(s.body[:8])) for s in sealed}
    assert len(nonces) == len(sealed)
    assert len({s.header.key_id for s in sealed}) > 20
    for offset, each in enumerate(sealed):
        assert open_batch(ring.data_key(each.header.key_id), each) == batch(base_offset=offset)


def test_a_batch_begun_after_a_rotation_returned_never_uses_the_old_key(ring: Keyring) -> None:
    sealer = ring.sealer(ORDERS, LIFE, 0, 1)
    seen: set[bytes] = set()
    for _ in range(20):
        key_id = sealer.seal(batch()).header.key_id
        assert key_id not in seen
        seen.add(key_id)
        ring.rotate_data()


# -- rotating the root ---------------------------------------------------------------------------------


def test_rotating_the_root_touches_no_data_and_keeps_everything_readable(folder: Path) -> None:
    ring = reopened(folder)
    sealed = [ring.sealer(stream, LIFE, 0, 1).seal(batch()) for stream in (ORDERS, CARDS)]
    rotation = ring.rotate_root()
    assert rotation.stream_keys == 2
    assert {i.key_id: i.state for i in ring.list() if i.level == "root"} == {
        rotation.old_root: KeyState.DECRYPT_ONLY,
        rotation.new_root: KeyState.ACTIVE,
    }
    assert {i.wrapped_by for i in ring.list() if i.level == "stream"} == {rotation.new_root}
    assert ring.destroy_retired_roots() == [rotation.old_root]
    assert ring.destroy_retired_roots() == []
    ring.close()
    assert [path.name for path in (folder / "roots").iterdir()] == [f"{rotation.new_root.hex()}.key"]
    ring = reopened(folder)
    for each in sealed:
        assert open_batch(ring.data_key(each.header.key_id), each) == batch()
    ring.sealer(ORDERS, LIFE, 0, 1).seal(batch())
    ring.close()


class Crash(BaseException):
    """The process ends here."""


class CrashingProvider(MemoryKeyProvider):
    """Crashes at the n-th call that a rotation makes."""

    countdown = -1

    def _step(self) -> None:
        self.countdown -= 1
        if self.countdown == 0:
            raise Crash

    def create_root(self) -> bytes:
        self._step()
        made = super().create_root()
        self._step()
        return made

    def wrap(self, key_id: bytes, plaintext: bytes, context: bytes) -> bytes:
        self._step()
        return super().wrap(key_id, plaintext, context)

    def unwrap(self, key_id: bytes, wrapped: bytes, context: bytes) -> bytes:
        self._step()
        return super().unwrap(key_id, wrapped, context)

    def destroy(self, key_id: bytes) -> None:
        self._step()
        super().destroy(key_id)
        self._step()


DISK_STEPS = ["before staging", "half staged", "after staging", "before rename", "after rename", "after"]


def crash_on_disk(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Let the next rewrite of the key file end the process at a step of it."""
    stage, sync = files.stage_file, files.sync_folder

    def staging(path: Path, data: bytes, mode: int = files.PRIVATE) -> Path:
        if step == "before staging":
            raise Crash
        if step == "half staged":
            # What a power cut leaves: half of the new file, under the name that it had meanwhile.
            (path.with_name(f".{path.name}.1.aa.new")).write_bytes(data[: len(data) // 2])
            raise Crash
        staged = stage(path, data, mode)
        if step == "after staging":
            raise Crash
        return staged

    def committing(staged: Path, path: Path) -> None:
        if step == "before rename":
            raise Crash
        staged.replace(path)
        if step == "after rename":
            raise Crash
        sync(path.parent)
        raise Crash

    monkeypatch.setattr("keys.store.stage_file", staging)
    monkeypatch.setattr("keys.store.commit_file", committing)


def everything_works(ring: Keyring, sealed: list[Batch]) -> None:
    for each in sealed:
        assert open_batch(ring.data_key(each.header.key_id), each) == batch()
    assert [i.state for i in ring.list() if i.level == "root"].count(KeyState.ACTIVE) == 1
    again = ring.sealer(ORDERS, LIFE, 0, 1).seal(batch())
    rotation = ring.rotate_root()
    ring.destroy_retired_roots()
    assert {i.key_id for i in ring.list() if i.level == "root" and i.state is KeyState.ACTIVE} == {
        rotation.new_root
    }
    for each in [*sealed, again]:
        assert open_batch(ring.data_key(each.header.key_id), each) == batch()


@pytest.mark.parametrize("at", range(1, 10))
def test_a_crash_at_any_call_to_the_provider_leaves_a_keyring_that_works(tmp_path: Path, at: int) -> None:
    provider = CrashingProvider("us-east")
    create_keyring(tmp_path, "us-east", provider=provider)
    ring = open_keyring(tmp_path, "us-east", provider=provider)
    sealed = [ring.sealer(stream, LIFE, 0, 1).seal(batch()) for stream in (ORDERS, CARDS)]
    provider.countdown = at
    # create 2, unwrap and wrap of two stream keys 4, destroy 2: eight steps, and a ninth where nothing crashes.
    if at < 9:
        with pytest.raises(Crash):
            ring.rotate_root()
            ring.destroy_retired_roots()
    else:
        ring.rotate_root()
        ring.destroy_retired_roots()
    provider.countdown = -1
    ring.close()
    ring = open_keyring(tmp_path, "us-east", provider=provider)
    everything_works(ring, sealed)
    ring.close()


@pytest.mark.parametrize("step", DISK_STEPS)
def test_a_crash_at_any_step_on_the_disk_leaves_a_keyring_that_works(
    folder: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = reopened(folder)
    sealed = [ring.sealer(stream, LIFE, 0, 1).seal(batch()) for stream in (ORDERS, CARDS)]
    with monkeypatch.context() as crashing:
        crash_on_disk(crashing, step)
        with pytest.raises(Crash):
            ring.rotate_root()
    ring.close()
    ring = reopened(folder)
    everything_works(ring, sealed)
    assert sorted(path.name for path in folder.iterdir()) == ["keys.lock", "keys.log", "roots"]
    ring.close()


def test_a_rotation_that_was_interrupted_goes_on_with_the_root_it_made(tmp_path: Path) -> None:
    provider = CrashingProvider("us-east")
    create_keyring(tmp_path, "us-east", provider=provider)
    ring = open_keyring(tmp_path, "us-east", provider=provider)
    ring.sealer(ORDERS, LIFE, 0, 1).seal(batch())
    provider.countdown = 3
    with pytest.raises(Crash):
        ring.rotate_root()
    ring.close()
    ring = open_keyring(tmp_path, "us-east", provider=provider)
    (pending,) = [i.key_id for i in ring.list() if i.state is KeyState.PENDING]
    assert ring.rotate_root().new_root == pending
    assert len(provider.root_key_ids()) == 2
    ring.close()


def test_a_failed_rotation_changes_nothing(ring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = ring.sealer(ORDERS, LIFE, 0, 1).seal(batch())
    before = [i for i in ring.list() if i.state is KeyState.ACTIVE]

    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as failing:
        failing.setattr("keys.store.stage_file", full)
        with pytest.raises(FelixError) as caught:
            ring.rotate_root()
    assert caught.value.code is Code.DISK_FULL
    assert [i for i in ring.list() if i.state is KeyState.ACTIVE] == before
    everything_works(ring, [sealed])


# -- destroying ----------------------------------------------------------------------------------------


def test_a_destroyed_stream_cannot_be_read_nor_written_and_others_can(folder: Path) -> None:
    ring = reopened(folder)
    orders, cards = ring.sealer(ORDERS, LIFE, 0, 1), ring.sealer(CARDS, LIFE, 0, 1)
    sealed, other = orders.seal(batch()), cards.seal(batch())
    wrapped = ring._tree.streams[ring._tree.by_incarnation[str(ORDERS), LIFE]].wrapped
    data_wrapped = ring._tree.data[sealed.header.key_id].wrapped
    assert len(ring.destroy(ORDERS)) == 1
    assert ring.destroy(ORDERS) == []
    for _ in range(2):
        with pytest.raises(KeyDestroyedError) as caught:
            ring.data_key(sealed.header.key_id)
        assert caught.value.code is Code.KEY_DESTROYED
        with pytest.raises(KeyDestroyedError):
            ring.data_key_for_writing(ORDERS, LIFE, 0, 2)
        assert open_batch(ring.data_key(other.header.key_id), other) == batch()
        assert {i.state for i in ring.list(ORDERS) if i.level != "root"} == {KeyState.DESTROYED}
        on_disk = (folder / KEY_FILE).read_bytes()
        assert wrapped not in on_disk
        assert data_wrapped not in on_disk
        ring.close()
        ring = reopened(folder)
    with pytest.raises(KeyDestroyedError):
        ring.sealer(ORDERS, LIFE, 0, 1).seal(batch())
    ring.close()


def test_a_sealer_that_was_open_when_its_stream_was_destroyed_seals_no_more(ring: Keyring) -> None:
    sealer: ShardSealer = ring.sealer(ORDERS, LIFE, 0, 1)
    sealer.seal(batch())
    ring.destroy(ORDERS)
    with pytest.raises(KeyDestroyedError):
        sealer.seal(batch())


def test_a_stream_created_anew_has_a_key_of_its_own(ring: Keyring) -> None:
    old = ring.sealer(ORDERS, LIFE, 0, 1).seal(batch())
    ring.destroy(ORDERS)
    new = ring.sealer(ORDERS, b"j" * 16, 0, 1).seal(batch())
    assert open_batch(ring.data_key(new.header.key_id), new) == batch()
    with pytest.raises(KeyDestroyedError):
        ring.data_key(old.header.key_id)


def test_destruction_survives_a_rotation_of_the_root(folder: Path) -> None:
    ring = reopened(folder)
    sealed = ring.sealer(ORDERS, LIFE, 0, 1).seal(batch())
    copy = (folder / KEY_FILE).read_bytes()
    ring.destroy(ORDERS)
    ring.rotate_root()
    ring.destroy_retired_roots()
    ring.close()
    ring = reopened(folder)
    with pytest.raises(KeyDestroyedError):
        ring.data_key(sealed.header.key_id)
    ring.close()
    # Not even a copy of the key file from before helps: the root it was wrapped under is gone.
    (folder / KEY_FILE).write_bytes(copy)
    with pytest.raises(KeyProviderError, match="active root key"):
        reopened(folder)


@pytest.mark.parametrize("step", DISK_STEPS)
def test_a_crash_while_destroying_leaves_the_stream_whole_or_gone(
    folder: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = reopened(folder)
    sealed = ring.sealer(ORDERS, LIFE, 0, 1).seal(batch())
    with monkeypatch.context() as crashing:
        crash_on_disk(crashing, step)
        with pytest.raises(Crash):
            ring.destroy(ORDERS)
    ring.close()
    ring = reopened(folder)
    renamed = DISK_STEPS.index(step) > DISK_STEPS.index("before rename")
    if renamed:
        with pytest.raises(KeyDestroyedError):
            ring.data_key(sealed.header.key_id)
    else:
        assert open_batch(ring.data_key(sealed.header.key_id), sealed) == batch()
    ring.close()


# -- opening -------------------------------------------------------------------------------------------


def test_the_list_shows_every_level_and_no_secret(ring: Keyring) -> None:
    sealer = ring.sealer(ORDERS, LIFE, 3, 7)
    first = sealer.seal(batch(shard=3, epoch=7))
    ring.rotate_data()
    second = sealer.seal(batch(shard=3, epoch=7))
    ring.sealer(CARDS, LIFE, 0, 1).seal(batch())
    assert [i.level for i in ring.list()] == ["root", "stream", "stream", "data", "data", "data"]
    listed = ring.list(ORDERS)
    assert [(i.level, i.state) for i in listed] == [
        ("root", KeyState.ACTIVE),
        ("stream", KeyState.ACTIVE),
        ("data", KeyState.DECRYPT_ONLY),
        ("data", KeyState.ACTIVE),
    ]
    assert [i.key_id for i in listed[2:]] == [first.header.key_id, second.header.key_id]
    assert {(i.shard, i.epoch, i.stream) for i in listed[2:]} == {(3, 7, str(ORDERS))}


def test_keys_of_an_earlier_process_are_for_decrypting_only(folder: Path) -> None:
    ring = reopened(folder)
    ring.sealer(ORDERS, LIFE, 0, 1).seal(batch())
    ring.close()
    ring = reopened(folder)
    assert [i.state for i in ring.list() if i.level == "data"] == [KeyState.DECRYPT_ONLY]
    ring.close()


def test_one_process_at_a_time_and_regions_are_not_mixed_up(folder: Path, ring: Keyring) -> None:
    with pytest.raises(RequestError) as caught:
        reopened(folder)
    assert caught.value.code is Code.CONFLICT
    ring.close()
    with pytest.raises(RequestError) as caught:
        open_keyring(folder, "eu-west")
    assert caught.value.code is Code.WRONG_REGION
    with pytest.raises(KeyScopeError):
        open_keyring(folder, "us-east", provider=MemoryKeyProvider("eu-west"))
    reopened(folder).close()


def test_a_folder_without_keys_and_a_second_creation_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        open_keyring(tmp_path / "nothing", "us-east")
    assert caught.value.code is Code.NOT_FOUND
    with pytest.raises(RequestError) as caught:
        create_keyring(folder, "us-east")
    assert caught.value.code is Code.ALREADY_EXISTS


def test_without_its_active_root_a_keyring_does_not_open(folder: Path) -> None:
    (root,) = (folder / "roots").iterdir()
    root.rename(folder / "away")
    with pytest.raises(KeyProviderError, match="Bring the root key back"):
        reopened(folder)
    (folder / "away").rename(root)
    reopened(folder).close()


def test_a_key_file_of_entries_that_do_not_belong_together_is_corruption(folder: Path) -> None:
    ring = reopened(folder)
    ring.sealer(ORDERS, LIFE, 0, 1).seal(batch())
    ring.close()
    store = KeyStore(folder, "us-east")
    bodies = list(store.bodies)
    for wrong in (bodies[1:], bodies[:1] + bodies[2:], [*bodies, bodies[-1]], [*bodies, b"\xc1"]):
        store.rewrite(wrong)
        store.close()
        with pytest.raises(CorruptionError):
            reopened(folder)
        store = KeyStore(folder, "us-east")
    store.close()
