"""Limits of a tenant or of an identity, as values that requests, the catalog and region.yaml share.

Rates are per second; counts and bytes are of what is held at a time. None leaves a limit to the region's default,
0 is without bound. Pure; `check` raises RequestError(CONFIG_INVALID) that names the limit and what is allowed.

Invariant: `in_force` of two values never holds a None.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

from felix.errors import Code, RequestError

Scope = Literal["tenant", "identity"]
SCOPES: Final = get_args(Scope)

RATES: Final = ("publish_bytes", "publish_records", "delivery_bytes", "delivery_records", "requests")
"""Per second: what passes through. Publishing and delivery are slowed down, requests are refused."""
HELD: Final = ("sessions", "subscriptions", "transactions", "leases")
"""At a time; what is beyond is refused."""
TENANT_ONLY: Final = ("streams", "stored_bytes")
"""Belong to a stream, and so to its tenant: no identity has them."""
IDENTITY_ONLY: Final = ("transactions",)
"""One may go over the streams of many tenants: it is its identity's."""
AMOUNT_MAX: Final = 1 << 53
"""The largest integer that every JSON reader represents exactly."""


class QuotaLimits(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The limits of one tenant or identity; each is of the region, and None if the default applies."""

    publish_bytes: int | None = None
    publish_records: int | None = None
    delivery_bytes: int | None = None
    delivery_records: int | None = None
    requests: int | None = None
    sessions: int | None = None
    subscriptions: int | None = None
    transactions: int | None = None
    leases: int | None = None
    streams: int | None = None
    stored_bytes: int | None = None

    def check(self, scope: str) -> None:
        """Raises RequestError(CONFIG_INVALID)."""
        if scope not in SCOPES:
            raise _invalid(f"a quota of a {scope[:40]!r}; it is of a tenant or of an identity")
        for name in LIMITS:
            value = self.of(name)
            if value is not None and not 0 <= value <= AMOUNT_MAX:
                raise _invalid(f"{name} of {value}; 0 (without bound) to {AMOUNT_MAX} are allowed")
            if value is not None and scope == "identity" and name in TENANT_ONLY:
                raise _invalid(f"{name} of an identity", "Streams belong to a tenant: set it there.")
            if value is not None and scope == "tenant" and name in IDENTITY_ONLY:
                raise _invalid(f"{name} of a tenant", "A transaction is its identity's: set it there.")

    def of(self, name: str) -> int | None:
        """The limit of this name."""
        value: int | None = getattr(self, name)
        return value

    @property
    def named(self) -> dict[str, int]:
        """The limits that are set here, by name."""
        return {name: value for name in LIMITS if (value := self.of(name)) is not None}

    def changed(self, by: QuotaLimits, unset: list[str] | None = None) -> QuotaLimits:
        """These limits with those of `by` in their place, and without those that are named in `unset`."""
        for name in unset or ():
            if name not in LIMITS:
                raise _invalid(f"a limit {name[:40]!r}; there is {', '.join(LIMITS)}")
        kept = {name: value for name, value in self.named.items() if name not in (unset or ())}
        return QuotaLimits(**{**kept, **by.named})

    def in_force(self, default: QuotaLimits) -> QuotaLimits:
        """The limits in force: these, the default for one that is not set, and no limit if neither sets one."""
        return QuotaLimits(**{**dict.fromkeys(LIMITS, 0), **default.named, **self.named})


LIMITS: Final = (*RATES, *HELD, *TENANT_ONLY)
NO_LIMITS: Final = QuotaLimits()


def _invalid(sentence: str, hint: str = "") -> RequestError:
    return RequestError(f"Quota: {sentence}.", code=Code.CONFIG_INVALID, hint=hint)
