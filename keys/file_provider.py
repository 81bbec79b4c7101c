"""Root keys as private files in one folder: for development and for single machines.

One file per root, `<key id in hex>.key`, mode 0600::

    0        prefix     `felix/root-key/1` and a zero byte
    17       key id  16
    33       secret  32
    65       check    8   first bytes of SHA-256 over all before it

Invariants: a root is durable before its id is given out; a file that does not hold what its name says is refused; no
file is ever overwritten. Anyone who can read the folder can read everything in the region (docs/threat-model.md).
Calls block on the disk.
"""

from __future__ import annotations

import hashlib
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from felix.context import purpose_prefix
from felix.errors import Code, RequestError, TamperError, UnavailableError
from felix.files import PRIVATE, create_file, read_file, sync_folder
from felix.runtime.port import Random
from felix.runtime.real import REAL
from felix.storage.port import is_full
from keys.errors import KeyProviderError
from keys.key_id import KEY_ID_BYTES, RANDOM_BYTES, KeyKind, check_key_id, new_key_id
from keys.provider import ROOT_SECRET_BYTES, unknown_root
from keys.wrapping import NONCE_BYTES, unwrap, wrap

_PREFIX: Final = purpose_prefix("root-key")
_CHECK_BYTES: Final = 8
_FILE_BYTES: Final = len(_PREFIX) + KEY_ID_BYTES + ROOT_SECRET_BYTES + _CHECK_BYTES


def _check(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECK_BYTES]


class FileKeyProvider:
    """Root keys in `folder`, which is made (0700) where it does not exist."""

    def __init__(self, folder: Path, region: str, random: Random = REAL.random) -> None:
        self._folder = folder
        self._region = region
        self._random = random.randbytes
        self._secrets: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def region(self) -> str:
        return self._region

    def root_key_ids(self) -> list[bytes]:
        found = []
        for path in self._folder.glob("*.key"):
            with suppress(ValueError, RequestError):
                key_id = bytes.fromhex(path.stem)
                check_key_id(key_id, self._region, KeyKind.ROOT)
                found.append(key_id)
        return sorted(found)

    def create_root(self) -> bytes:
        key_id = new_key_id(self._region, KeyKind.ROOT, self._random(RANDOM_BYTES))
        data = _PREFIX + key_id + self._random(ROOT_SECRET_BYTES)
        try:
            create_file(self._path(key_id), data + _check(data), PRIVATE)
        except OSError as error:
            raise UnavailableError(
                f"A new root key could not be written to {self._folder}: {error}.",
                code=Code.DISK_FULL if is_full(error) else Code.UNAVAILABLE,
                hint="Nothing was changed. Make room or look at the disk, then try again.",
            ) from error
        return key_id

    def wrap(self, key_id: bytes, plaintext: bytes, context: bytes) -> bytes:
        return wrap(self._secret(key_id), key_id, plaintext, context, self._random(NONCE_BYTES))

    def unwrap(self, key_id: bytes, wrapped: bytes, context: bytes) -> bytes:
        return unwrap(self._secret(key_id), key_id, wrapped, context)

    def destroy(self, key_id: bytes) -> None:
        """Overwrites the file and removes it. A disk that writes elsewhere (most SSDs) may keep the old block a while."""
        check_key_id(key_id, self._region, KeyKind.ROOT)
        path = self._path(key_id)
        with self._lock:
            self._secrets.pop(key_id, None)
            try:
                with path.open("r+b") as file:
                    file.write(bytes(_FILE_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
                path.unlink()
                sync_folder(self._folder)
            except FileNotFoundError:
                # Perhaps of a try whose sync of the folder failed.
                sync_folder(self._folder)
            except OSError as error:
                raise KeyProviderError(
                    f"Root key {key_id.hex()} could not be destroyed: {error}.",
                    hint=f"Remove {path} by hand, and every copy of it.",
                ) from error

    def _path(self, key_id: bytes) -> Path:
        return self._folder / f"{key_id.hex()}.key"

    def _secret(self, key_id: bytes) -> bytes:
        check_key_id(key_id, self._region, KeyKind.ROOT)
        with self._lock:
            secret = self._secrets.get(key_id)
            if secret is None:
                secret = self._secrets[key_id] = self._read(key_id)
        return secret

    def _read(self, key_id: bytes) -> bytes:
        path = self._path(key_id)
        try:
            data = read_file(path, "a root key", private=True)
        except RequestError as error:
            if error.code is Code.NOT_FOUND:
                raise unknown_root(key_id) from error
            raise
        except OSError as error:
            raise UnavailableError(
                f"{path}, a root key, cannot be read now: {error}.",
                hint="Look at the disk, and how many files the process may open. It is read again when it is needed next.",
                retry_after_ms=1_000,
            ) from error
        body = data[:-_CHECK_BYTES]
        if (
            len(data) != _FILE_BYTES
            or not body.startswith(_PREFIX + key_id)
            or _check(body) != data[-_CHECK_BYTES:]
        ):
            raise TamperError(
                f"{path} does not hold root key {key_id.hex()}: it was changed, cut off or renamed.",
                hint="Restore it from its backup; nothing wrapped under it can be read without it.",
            )
        return body[-ROOT_SECRET_BYTES:]
