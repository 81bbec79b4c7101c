"""Calls of a store that hangs: each has an end, and what may yet be done late undoes nothing."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hanging_object_store
import pytest
from hanging_object_store import HangingFiles, hanging

from felix.errors import UnavailableError
from felix.lazy_event import LazyThreadEvent
from felix.storage.disk import DiskFiles
from region.log import fsspec_store as store
from region.log import store_calls
from region.log.compactor import WorkEndedError
from region.log.store_calls import ended_by, silent_stores, store_of

PLACE = "hanging://store/us-east/rolls/00000"
OBJECT, OTHER = f"{PLACE}/1.seg", f"{PLACE}/2.seg"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(store_calls, "STALLED_S", 0.2)
    monkeypatch.setattr(store_calls, "WHOLE_S", 0.2)
    monkeypatch.setattr(store_calls, "PROBE_S", 0.2)
    monkeypatch.setattr(store_calls, "PROBE_PAUSE_S_MAX", 0.4)
    hanging_object_store.clear()
    yield
    hanging_object_store.clear()
    until(lambda: not silent_stores() and not HangingFiles.waiting.total())


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("held", "ask"),
    [
        ("makedirs", lambda folder: store.put_bytes(b"x", OTHER)),
        ("write", lambda folder: store.put_file(DiskFiles(), folder / "file", OTHER)),
        ("read", lambda folder: store.get_bytes(OBJECT)),
        ("read", lambda folder: store.get_file(DiskFiles(), OBJECT, folder / "target")),
        ("body", lambda folder: store.digest_of(OBJECT)),
        ("info", lambda folder: store.is_there(OBJECT)),
        ("ls", lambda folder: store.list_names(PLACE)),
        ("delete", lambda folder: store.delete(OBJECT)),
    ],
)
def test_each_call_ends_and_the_store_is_asked_again_once_it_answers(
    tmp_path: Path, held: str, ask: Callable[[Path], object]
) -> None:
    (tmp_path / "file").write_bytes(b"y" * 100)
    store.put_bytes(b"x", OBJECT)
    with hanging(held, "info"):
        with pytest.raises(UnavailableError, match="does not answer"):
            ask(tmp_path)
        asked = HangingFiles.waiting[held]
        assert silent_stores() == ["hanging://store"]
        for _ in range(5):
            with pytest.raises(UnavailableError, match="does not answer"):
                ask(tmp_path)
        assert held == "info" or HangingFiles.waiting[held] == asked, (
            "of a store that is silent nothing is asked"
        )
    until(lambda: not silent_stores())
    until(lambda: not HangingFiles.waiting.total())
    ask(tmp_path)


@pytest.mark.parametrize("held", ["write", "delete"])
def test_what_may_yet_be_done_is_waited_for_by_whoever_would_change_the_same_object(held: str) -> None:
    store.put_bytes(b"x", OBJECT)
    with hanging(held, path="1.seg"):
        with pytest.raises(UnavailableError, match="does not answer"):
            store.put_bytes(b"late", OBJECT) if held == "write" else store.delete(OBJECT)
        # It answers a probe.
        until(lambda: not silent_stores())
        for change in (lambda: store.put_bytes(b"new", OBJECT), lambda: store.delete(OBJECT)):
            with pytest.raises(UnavailableError, match="has not come back"):
                change()
        with pytest.raises(UnavailableError, match="has not come back"):
            store.list_names(PLACE)
        # All else goes on.
        store.put_bytes(b"other", OTHER)
        assert store.get_bytes(OBJECT) == b"x"
        assert store.list_names("hanging://store/us-east/rolls/00001") == []
    until(lambda: not store_calls.changes_below(PLACE))
    store.put_bytes(b"new", OBJECT)
    time.sleep(0.1)
    assert store.get_bytes(OBJECT) == b"new" and store.list_names(PLACE) == ["1.seg", "2.seg"]


def test_a_store_that_answers_probes_and_nothing_else_holds_a_bounded_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_calls, "STALLED_S", 0.01)
    monkeypatch.setattr(store_calls, "PROBE_PAUSE_S_MAX", 0.01)
    monkeypatch.setattr(store_calls, "LEFT_MAX", 12, raising=False)
    store.put_bytes(b"x", OBJECT)
    with hanging("read", "write", path="/rolls/"):
        for at in range(30):
            until(lambda: "hanging://store" not in store_calls._silent)
            with pytest.raises(UnavailableError):
                store.get_bytes(OBJECT) if at % 2 else store.put_bytes(b"y", f"{PLACE}/{at}.seg")
        assert HangingFiles.waiting.total() == 12
        with pytest.raises(UnavailableError, match="12 calls of hanging://store have not come back") as told:
            store.list_names("hanging://store/us-east/other")
        assert "restart the broker" in (told.value.hint or "")
        (problem,) = store_calls.silence_problems()
        assert "12 calls of the store hanging://store have not come back: it is asked nothing more" in problem
        assert silent_stores() == ["hanging://store"]
    until(lambda: not HangingFiles.waiting.total() and not silent_stores())
    until(lambda: not store_calls.silence_problems())
    assert store.get_bytes(OBJECT) == b"x"


def test_what_never_comes_back_is_told_of_though_the_store_answers_otherwise() -> None:
    with hanging("write", path="1.seg"):
        with pytest.raises(UnavailableError):
            store.put_bytes(b"late", OBJECT)
        until(lambda: not silent_stores())
        (problem,) = store_calls.silence_problems()
        assert problem.startswith("1 call of the store hanging://store has not come back: what may yet be")
    until(lambda: not store_calls.silence_problems())


class Passing(threading.Event):
    """Each wait of it is over at once, as if it had been as long: for `total` seconds."""

    def __init__(self, total: float) -> None:
        super().__init__()
        self.total = total
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return sum(self.waits) > self.total


def test_a_store_that_is_silent_for_a_year_keeps_a_hundred_threads_and_is_still_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_calls, "PROBE_S", 0.001)
    monkeypatch.setattr(store_calls, "PROBE_PAUSE_S_MAX", 0.06)
    year = Passing(365 * 86_400 / 10_000)
    asked, held = 0, threading.Event()

    def probe() -> None:
        nonlocal asked
        asked += 1
        assert asked <= 200
        held.wait()

    try:
        store_calls._ask("hanging://year", probe, year)
        assert 16 < asked <= 100
        assert max(year.waits) <= max(0.06, year.total / 8)
    finally:
        held.set()


def test_a_folder_is_given_no_more_at_a_time_than_a_slow_file_server_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, unsynced, sync = tmp_path / "source", list[int](), os.fsync
    source.write_bytes(bytes(18 << 20))
    synced = 0

    def counted(descriptor: int) -> None:
        nonlocal synced
        if stat.S_ISREG((found := os.fstat(descriptor)).st_mode):
            unsynced.append(found.st_size - synced)
            synced = found.st_size
        sync(descriptor)

    monkeypatch.setattr(store_calls, "STALLED_S", 60.0)
    monkeypatch.setattr(store_calls, "WHOLE_S", 60.0)
    monkeypatch.setattr(os, "fsync", counted)
    store.put_file(DiskFiles(), source, f"file://{tmp_path}/store/1.seg")
    assert sum(unsynced) == 18 << 20 and max(unsynced) <= store.PART_BYTES


def test_work_that_is_ended_waits_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_calls, "STALLED_S", 600.0)
    store.put_bytes(b"x", OBJECT)
    first, second = LazyThreadEvent(), LazyThreadEvent()
    told: list[BaseException] = []

    def read() -> None:
        try:
            with ended_by(first), ended_by(second):
                store.get_bytes(OBJECT)
        except WorkEndedError as error:
            told.append(error)

    with hanging("read"):
        for end in (first, second):
            reading = threading.Thread(target=read)
            reading.start()
            if end is first:
                until(lambda: HangingFiles.waiting["read"] > 0)
            end.set()
            reading.join(60)
            assert not reading.is_alive()
        assert len(told) == 2 and not silent_stores(), "that nobody waits says nothing of the store"
    assert store.get_bytes(OBJECT) == b"x"


def test_a_store_is_what_hangs_together_and_named_without_secrets() -> None:
    assert store_of("s3://bucket/felix/us-east/x") == store_of("s3://bucket/other") == "s3://bucket"
    assert store_of("s3://key:secret@bucket/x") == "s3://bucket"
    assert store_of("file:///mnt/one/felix/x") == "file:///mnt/one"
    assert store_of("file:///mnt/two/felix/x") != store_of("file:///mnt/one/felix/x")
