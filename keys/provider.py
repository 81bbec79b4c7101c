"""The port to where a region's root keys live, and its twin in memory.

A root key never leaves its provider: it wraps and unwraps stream keys there. Implementations: `FileKeyProvider`
(keys.file_provider) for development and single machines, `MemoryKeyProvider` here for tests of what stands on top.
Both pass one conformance suite (tests/keys/test_provider.py), as any further one must.

Calls may block on a disk or a network: never on an event loop. A provider may be shared between threads.
"""

from __future__ import annotations

import threading
from typing import Final, Protocol

from felix.runtime.port import Random
from felix.runtime.real import REAL
from keys.errors import KeyUnknownError
from keys.key_id import RANDOM_BYTES, KeyKind, check_key_id, new_key_id
from keys.wrapping import NONCE_BYTES, unwrap, wrap

ROOT_SECRET_BYTES: Final = 32


class KeyProvider(Protocol):
    """Root keys of one region.

    - an id of another region or kind is refused with KeyScopeError before anything else happens;
    - after `create_root` returns, the key survives a crash; after `destroy` returns, it wraps and unwraps nothing.
    """

    @property
    def region(self) -> str:
        """The region whose root keys these are."""
        ...

    def root_key_ids(self) -> list[bytes]:
        """The ids of all roots that can be used, in ascending order."""
        ...

    def create_root(self) -> bytes:
        """Make a new root key and return its id."""
        ...

    def wrap(self, key_id: bytes, plaintext: bytes, context: bytes) -> bytes:
        """Raises KeyScopeError, KeyUnknownError, KeyProviderError, UnavailableError where the place does not answer now."""
        ...

    def unwrap(self, key_id: bytes, wrapped: bytes, context: bytes) -> bytes:
        """Raises KeyScopeError, KeyUnknownError, KeyProviderError, UnavailableError where the place does not answer now, TamperError for another context
        or changed bytes."""
        ...

    def destroy(self, key_id: bytes) -> None:
        """Make a root unusable for ever; one that is gone already is no error. Raises KeyScopeError, KeyProviderError."""
        ...


class MemoryKeyProvider:
    """Root keys that end with the process."""

    def __init__(self, region: str, random: Random = REAL.random) -> None:
        self._region = region
        self._random = random.randbytes
        self._secrets: dict[bytes, bytes] = {}
        self._lock = threading.Lock()

    @property
    def region(self) -> str:
        return self._region

    def root_key_ids(self) -> list[bytes]:
        with self._lock:
            return sorted(self._secrets)

    def create_root(self) -> bytes:
        key_id = new_key_id(self._region, KeyKind.ROOT, self._random(RANDOM_BYTES))
        with self._lock:
            self._secrets[key_id] = self._random(ROOT_SECRET_BYTES)
        return key_id

    def wrap(self, key_id: bytes, plaintext: bytes, context: bytes) -> bytes:
        return wrap(self._secret(key_id), key_id, plaintext, context, self._random(NONCE_BYTES))

    def unwrap(self, key_id: bytes, wrapped: bytes, context: bytes) -> bytes:
        return unwrap(self._secret(key_id), key_id, wrapped, context)

    def destroy(self, key_id: bytes) -> None:
        check_key_id(key_id, self._region, KeyKind.ROOT)
        with self._lock:
            self._secrets.pop(key_id, None)

    def _secret(self, key_id: bytes) -> bytes:
        check_key_id(key_id, self._region, KeyKind.ROOT)
        with self._lock:
            secret = self._secrets.get(key_id)
        if secret is None:
            raise unknown_root(key_id)
        return secret


def unknown_root(key_id: bytes) -> KeyUnknownError:
    """The error for a root key that a provider does not have."""
    return KeyUnknownError(
        f"Root key {key_id.hex()} is not in this region's key provider.",
        hint="If it was moved, bring it back; if it was destroyed, what it wrapped cannot be read again.",
    )
