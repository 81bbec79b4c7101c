"""Errors of keys, below the families in felix.errors."""

from __future__ import annotations

from felix.errors import Code, FelixError, RequestError


class KeyScopeError(RequestError):
    """A key was asked to do what it was not made for: another region's id, another stream, a second sealer."""

    default_code = Code.KEY_SCOPE


class KeyUnknownError(RequestError):
    """No key of this id is here."""

    default_code = Code.KEY_UNKNOWN


class KeyDestroyedError(RequestError):
    """The key was destroyed on purpose; what it sealed cannot be read again."""

    default_code = Code.KEY_DESTROYED


class KeyExhaustedError(FelixError):
    """A data key reached its limit of batches; the sealing code must take a fresh one first."""

    default_code = Code.KEY_EXHAUSTED


class KeyProviderError(FelixError):
    """The place where root keys live refused or failed."""

    default_code = Code.KEY_PROVIDER
