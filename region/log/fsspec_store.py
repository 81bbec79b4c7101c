"""Object stores by URL, through fsspec: local folders, memory, and whatever has its package installed. Blocking.

Every failure of a store is an UnavailableError here, whatever its library raises, also where it does not come back (region.log.store_calls): the log goes on
without it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem

from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.storage.port import Files, write_all
from region.log.compactor import WorkEndedError
from region.log.store_calls import StoreCall, changes_below

P = ParamSpec("P")
T = TypeVar("T")

CHUNK_BYTES: Final = 1 << 20
"""Moved at a time: what a throttle counts, and what a stop waits for."""

PART_BYTES: Final = 5 << 20
"""Written to a store at a time, the least that S3 takes: libraries take tens of MiB by themselves, and this machine's memory takes all that is for a
folder, which a slow way does not bring over within a step's time (region.log.store_calls)."""

SMALL_BYTES_MAX: Final = 16 << 20
"""Of an object that is read into memory, unless it is a list."""

LOCAL_SCHEMES: Final = ("file", "local")
"""Of this machine's folders. fsspec takes what stands behind the second slash for a path below the working directory."""

Pace = Callable[[int], None]
"""Called with the bytes that were moved; sleeps, or raises to end the work."""


class Digest(NamedTuple):
    """Length and SHA-256 (hex) of an object."""

    size: int
    sha256: str


def no_pace(moved: int) -> None:
    """As fast as it goes."""


def check_url(url: str) -> None:
    """Raises RequestError(CONFIG_INVALID) where this URL can never be a store here: wrong scheme, a package that is not
    installed, or parts that would lead somewhere else than its text says. Imports the scheme's package."""
    check_parts(url)
    check_absolute(url)
    check_package(url)


def check_parts(url: str) -> None:
    """The URL's text alone: nothing is imported. Raises RequestError(CONFIG_INVALID)."""
    parts = urlsplit(url)
    if not parts.scheme or "::" in url or ".." in parts.path.split("/") or parts.query or parts.fragment:
        raise _wrong(
            url,
            "it is not scheme://place/path, without .., ?, # and ::",
            "As in file:///srv/felix or s3://bucket/felix.",
        )
    if parts.password is not None:
        raise _wrong(
            url, "it carries a password", "Give the broker's process its credentials by its environment."
        )


def check_absolute(url: str) -> None:
    """Of a folder of this machine: whether it is the same one wherever a process was started. Raises RequestError(CONFIG_INVALID)."""
    scheme = urlsplit(url).scheme
    if scheme in LOCAL_SCHEMES and not url.startswith(f"{scheme}:///"):
        raise _wrong(
            url,
            "it is no absolute path, and where a relative one leads depends on the folder that a process was started in",
            "With three slashes, as in file:///srv/felix.",
        )


def check_package(url: str) -> None:
    """Imports the package of the URL's scheme. Raises RequestError(CONFIG_INVALID) where there is none."""
    scheme = urlsplit(url).scheme
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise _wrong(
            url, f"{scheme}:// needs a package that is not installed: {error}", "Install it for the broker."
        ) from error
    except ValueError as error:
        raise _wrong(url, f"{scheme}:// is no scheme that fsspec knows", "") from error


def is_allowed(url: str, prefixes: tuple[str, ...]) -> bool:
    """Whether the URL is one of `prefixes` or lies below one."""
    return any(
        url.rstrip("/") == prefix.rstrip("/") or url.startswith(prefix.rstrip("/") + "/")
        for prefix in prefixes
    )


def _wrong(url: str, why: str, hint: str) -> RequestError:
    return RequestError(f"{_shown(url)} cannot be a store: {why}.", code=Code.CONFIG_INVALID, hint=hint)


def _shown(url: str) -> str:
    """Without what stands before an @: it may be a secret."""
    scheme, separator, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{separator}{place.rpartition('@')[2]}{slash}{path}"[:200]


class _Place(NamedTuple):
    """Where a URL leads. `do` has the store's library do a step, with an end."""

    call: StoreCall
    files: Any
    path: str

    def do(self, step: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.call.do(step, *args, **kwargs)


@contextmanager
def _reaching(url: str, *, changes: bool = False) -> Iterator[_Place]:
    """File system and path of a URL; what goes wrong in here is the store's fault. `changes`: what is done may change the object."""
    try:
        call = StoreCall(url, lambda: _ask_for(url), changes=changes)
        files, path = call.do(fsspec.core.url_to_fs, url)
        yield _Place(call, files, path)
    except WorkEndedError:
        raise
    except UnavailableError as error:
        raise _failed(url, error.sentence.rstrip("."), error.hint) from error
    except FelixError:
        raise
    except Exception as error:
        # Each store's library has exceptions of its own.
        raise _failed(url, f"{type(error).__name__}: {error}") from error


def _failed(url: str, why: str, hint: str = "") -> UnavailableError:
    return UnavailableError(
        f"The store of {_shown(url)} does not do what it was asked: {why}"[:500] + ".",
        code=Code.UNAVAILABLE,
        hint=hint
        or "Look after the store, its credentials and the way to it; the log goes on with what is local.",
        retry_after_ms=1_000,
    )


def _ask_for(url: str) -> None:
    files, path = fsspec.core.url_to_fs(url)
    # What it said once is no answer.
    files.invalidate_cache()
    files.info(path)


def put_file(files: Files, source: Path, url: str, pace: Pace = no_pace) -> Digest:
    """Write a file as an object, over what was there; what was read from the file."""
    digest, size = hashlib.sha256(), 0
    descriptor = files.open(source, os.O_RDONLY)
    try:
        with _reaching(url, changes=True) as place, _writing(place) as write:
            while chunk := files.pread(descriptor, CHUNK_BYTES, size):
                write(chunk)
                digest.update(chunk)
                size += len(chunk)
                pace(len(chunk))
    finally:
        files.close(descriptor)
    return Digest(size, digest.hexdigest())


def put_bytes(data: bytes, url: str) -> None:
    """Write a small object."""
    with _reaching(url, changes=True) as place, _writing(place) as write:
        for begin in range(0, len(data), CHUNK_BYTES):
            write(data[begin : begin + CHUNK_BYTES])


@contextmanager
def _writing(place: _Place) -> Iterator[Callable[[bytes], None]]:
    """What writes to an object that is written anew, and is there for good once this is left."""
    files, path = place.files, place.path
    place.do(files.makedirs, files._parent(path), exist_ok=True)
    with place.call.opened(lambda: files.open(path, "wb", block_size=PART_BYTES)) as writer:
        unsynced = 0

        def write(chunk: bytes) -> None:
            nonlocal unsynced
            place.do(writer.write, chunk)
            unsynced += len(chunk)
            if unsynced >= PART_BYTES and isinstance(files, LocalFileSystem):
                place.do(_sync, writer)
                unsynced = 0

        yield write
    place.call.do_whole(_settle, files, path)


def _sync(writer: Any) -> None:
    """What a folder of this machine was given goes where it belongs now: it may be a file server's, and a sync of all of a segment would take too long."""
    writer.flush()
    os.fsync(writer.fileno())


def _settle(files: Any, path: str) -> None:
    """A folder of this machine promises nothing before a sync; other stores do once they have answered."""
    if isinstance(files, LocalFileSystem):
        for place, flags in ((path, os.O_RDONLY), (files._parent(path), os.O_RDONLY | os.O_DIRECTORY)):
            descriptor = os.open(place, flags)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def get_bytes(url: str, most: int = SMALL_BYTES_MAX) -> bytes:
    """A small object. Of one that has more than `most` bytes, no more than one beyond is read."""
    with _reaching(url) as place:
        do = place.do if most <= SMALL_BYTES_MAX else place.call.do_whole
        found: bytes = do(place.files.cat_file, place.path, 0, most + 1)
        return found


def is_there(url: str) -> bool:
    """Whether there is such an object. Raises UnavailableError where the store does not say: fsspec's own `exists` says no then, of folders of this
    machine and of most stores."""
    with _reaching(url) as place:
        try:
            place.do(place.files.info, place.path)
        except FileNotFoundError:
            return False
        return True


def get_file(files: Files, url: str, target: Path, pace: Pace = no_pace) -> Digest:
    """Read an object into a file, over what was there; what was read. The file is not synced."""
    digest, size = hashlib.sha256(), 0
    descriptor = files.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        with closing(_chunks(url, pace)) as chunks:
            for chunk in chunks:
                digest.update(chunk)
                size = write_all(files, descriptor, (chunk,), size)
    finally:
        files.close(descriptor)
    return Digest(size, digest.hexdigest())


def digest_of(url: str, pace: Pace = no_pace) -> Digest:
    """Read an object and say what it is."""
    digest, size = hashlib.sha256(), 0
    with closing(_chunks(url, pace)) as chunks:
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
    return Digest(size, digest.hexdigest())


def _chunks(url: str, pace: Pace) -> Generator[bytes, None, None]:
    with (
        _reaching(url) as place,
        place.call.opened(lambda: place.files.open(place.path, "rb", block_size=4 * CHUNK_BYTES)) as reader,
    ):
        while chunk := place.do(reader.read, CHUNK_BYTES):
            yield chunk
            pace(len(chunk))


def delete(url: str) -> None:
    """Delete an object; one that is not there is deleted already."""
    with _reaching(url, changes=True) as place:
        try:
            place.do(place.files.rm_file, place.path)
        except FileNotFoundError:
            return


def list_names(url: str) -> list[str]:
    """Names directly below a URL, sorted; none where there is nothing. Raises UnavailableError, too, while a call that was given up may still
    change what is there."""
    with _reaching(url) as place:
        if changes_below(url):
            raise UnavailableError("an earlier call that changes what is there has not come back")
        files, path = place.files, place.path
        try:
            found = place.call.do_whole(files.ls, path, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        except TypeError:
            found = place.call.do_whole(files.ls, path, detail=False)
        return sorted(str(each).rstrip("/").rpartition("/")[2] for each in found)
