"""Whether a bundle has room to say where a region's keys ended, and which regions' logs take it.

Of each change the bundle names an end in every log that the region had cosigned, so other regions take room by having many logs: they add their bridges' logs by
themselves, each with a name of up to 255 bytes. A change of stolen keys must not wait for somebody to find that out: the refusal names them, and options that make room.
Pure, but for `logs_without`, which reads the bundles of a folder. Callers: region.trust.signing_keys, cli.region.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from typing import Final

import msgspec

from felix.errors import Code, RequestError
from felix.names import trust_domain
from keys.bundle import BUNDLE_BYTES_MAX, ENDS_MAX, FormerKeys, KeyEnd, RegionBundle, SignedBundle
from region.config import RegionConfig
from region.folder import RegionFolder
from region.trust.trust_store import believed_bundles
from region.trust.trusted_bundles import pinned_bundles

TOLD_MAX: Final = 8
"""Regions that a refusal names, those with the most room first."""


def require_room(
    changed: RegionBundle,
    at: int = -1,
    *,
    dropped: int | None = None,
    held: Iterable[KeyEnd] = (),
    dealt: Container[str] | None = None,
) -> None:
    """That this bundle can be written, whose former keys `at` were given ends now. `dropped`: of a change, of how many of the earliest ones the keys were
    left out already; `held`: where ends are raised, those that stay anyway; `dealt`: the regions that a leaf of the region's own log names, where that is at hand: with the others it had no grant. Raises RequestError(CONFLICT) where it cannot, with which regions' logs take the room, and the
    options that make some."""
    size, logs = _bytes_of(changed), max((len(keys.ends) for keys in changed.former), default=0)
    if size <= BUNDLE_BYTES_MAX and logs <= ENDS_MAX:
        return
    over = (
        f"The keys ended in {logs} logs; a bundle names {ENDS_MAX} of one change"
        if logs > ENDS_MAX
        else f"The bundle would have {size:,} bytes; {BUNDLE_BYTES_MAX:,} are allowed"
    )
    taken = _taken(changed)
    told = [
        f"{domain} ({number} logs, {room:,} bytes)"
        for domain, (number, room) in list(taken.items())[:TOLD_MAX]
    ]
    if len(taken) > TOLD_MAX:
        told.append(f"{len(taken) - TOLD_MAX} more regions")
    raise RequestError(
        f"{over}. By region, where keys ended takes {', '.join(told)}.",
        code=Code.CONFLICT,
        hint=_hint(changed, at, taken, dropped, {end.log for end in held}, dealt),
    )


def logs_without(folder: RegionFolder, config: RegionConfig, without: Iterable[str]) -> list[str]:
    """The logs that are to be left out, where `without` may name a region as REGION.MESH: then all of its logs that a bundle names, which this folder trusts, or a broker
    whose data folder lies here. Blocks."""
    without = list(dict.fromkeys(without))
    known = [
        pinned_bundles(folder),
        *(believed_bundles(folder.root / data / "governance") for data in config.data_folders),
    ]
    logs = (
        key.name
        for bundles in known
        for each in bundles.values()
        for key in each.audit_keys
        if key.role == "log"
    )
    return list(dict.fromkeys([*without, *(log for log in logs if _domain_of(log) in without)]))


def _bytes_of(bundle: RegionBundle) -> int:
    return len(SignedBundle(bundle, bytes(64)).encode())


def _domain_of(log: str) -> str:
    return log.partition("/")[0]


def _taken(bundle: RegionBundle) -> dict[str, tuple[int, int]]:
    """By region, in how many of its logs keys ended, and how many bytes of the bundle say so, over all changes; those with the most first."""
    size = _bytes_of(bundle)
    logs = Counter(_domain_of(log) for log in {end.log for keys in bundle.former for end in keys.ends})
    found = {
        domain: (
            number,
            size - _bytes_of(bundle.with_former(tuple(_less(keys, [domain]) for keys in bundle.former))),
        )
        for domain, number in logs.items()
    }
    return dict(sorted(found.items(), key=lambda each: (-each[1][1], each[0])))


def _less(keys: FormerKeys, domains: Iterable[str], held: Container[str] = ()) -> FormerKeys:
    """These former keys without their ends in logs of these regions, but for the held ones."""
    domains = set(domains)
    kept = (end for end in keys.ends if end.log in held or _domain_of(end.log) not in domains)
    return msgspec.structs.replace(keys, ends=tuple(kept))


def _fits(bundle: RegionBundle) -> bool:
    return _bytes_of(bundle) <= BUNDLE_BYTES_MAX and all(len(keys.ends) <= ENDS_MAX for keys in bundle.former)


def _hint(
    changed: RegionBundle,
    at: int,
    taken: Iterable[str],
    dropped: int | None,
    held: Container[str],
    dealt: Container[str] | None,
) -> str:
    """Regions without whose logs it fits, in this order until it does, those first that were never dealt with; and how many of the earliest changes have to go instead."""
    former, own = list(changed.former), trust_domain(changed.region, changed.mesh)
    added = {_domain_of(end.log) for end in former[at].ends if end.log not in held} - {own}
    strangers = [domain for domain in taken if domain in added and _is_stranger(domain, changed.mesh, dealt)]
    leave, fits = list[str](), False
    for domain in [*strangers, *(domain for domain in taken if domain in added and domain not in strangers)]:
        leave.append(domain)
        less = [*former]
        less[at] = _less(former[at], leave, held)
        if fits := _fits(changed.with_former(tuple(less))):
            break
    said = []
    if leave:
        options = " ".join(f"--without {domain}" for domain in (leave if fits else leave[:1]))
        said.append(
            f"Add {options}, which makes {'room' if fits else 'some'}: nothing that these keys signed counts then in those regions' logs. "
            "--without LOG leaves a single log out."
        )
        if named := [domain for domain in leave if domain in strangers]:
            said.append(
                f"No leaf of {changed.region}'s audit log names {', '.join(named[:TOLD_MAX])}{' and others' if len(named) > TOLD_MAX else ''}: there was no grant with them."
            )
    if dropped is not None and len(former) > 1:
        drops = (n for n in range(1, len(former)) if _fits(changed.with_former(tuple(former[n:]))))
        enough = next(drops, None)
        said.append(
            f"{'Or' if said else 'Add'} --drop-earliest {dropped + (enough or len(former) - 1)}, which makes {'room' if enough else 'some'}: what the keys of "
            "so many of the earliest changes signed counts for nothing then."
        )
    return " ".join(said)


def _is_stranger(domain: str, mesh: str, dealt: Container[str] | None) -> bool:
    return dealt is not None and domain.removesuffix(f".{mesh}") not in dealt
