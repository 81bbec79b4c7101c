"""Which certificates of a region near their end: from the files of its folder, and from what its broker has seen. Blocks on the disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from felix.errors import FelixError
from felix.expiry import Life, Stage, stage_of
from felix.identity import Identity
from felix.identity_file import load_identity
from felix.messages import ExpiryState
from keys.authority import load_authority
from region.config import RegionConfig
from region.folder import RegionFolder

_ADVICE = {
    "issuing": "felix identity renew-issuing, with the root key",
    "root": "the region has to be made anew by then",
    "broker": "the broker renews it by itself: look into its log",
}


class _Late(NamedTuple):
    """A certificate in the last third of its life."""

    name: str
    kind: str
    not_after_ms: int
    stage: str
    """that of `Stage`, or what a newer broker calls it"""


def identities_here(folder: RegionFolder) -> Iterator[Identity]:
    """Those that lie in the region's folder and can be read."""
    for path in sorted(folder.identities.glob("*.pem")):
        if path.name.endswith((".audit.pem", ".audit.mldsa.pem")):
            continue
        try:
            yield load_identity(path)
        except FelixError:
            continue  # `felix doctor` says what is wrong with it


def expiring(
    folder: RegionFolder, config: RegionConfig, now_ms: int, told: Iterable[ExpiryState] = ()
) -> list[dict[str, Any]]:
    """Certificates in the last third of their life, the nearest end first: name, type, not_after_ms, stage and advice.

    `told`: what the broker says; a newer file counts more."""
    lives: dict[str, tuple[str, Life]] = {
        str(each.spiffe_id): (each.spiffe_id.kind, Life(each.not_before_ms, each.not_after_ms))
        for each in identities_here(folder)
    }
    try:
        authority = load_authority(folder.authority, config.region, config.mesh)
    except FelixError:
        pass  # kept elsewhere: the broker tells of it
    else:
        for kind, (start_ms, end_ms) in authority.lives().items():
            lives[f"{authority.trust_domain} {kind} certificate"] = (kind, Life(start_ms, end_ms))
    found = [
        _Late(name, kind, life.not_after_ms, stage.name.lower())
        for name, (kind, life) in lives.items()
        if (stage := stage_of(life, now_ms)) > Stage.FRESH
    ]
    found += [
        _Late(each.name, each.kind, each.not_after_ms, each.stage)
        for each in told
        if each.name not in lives or lives[each.name][1].not_after_ms < each.not_after_ms
    ]
    return [_row(late) for late in sorted(found, key=lambda late: late.not_after_ms)]


def _advice(late: _Late) -> str:
    """What is to be done about it."""
    if late.kind in _ADVICE:
        return _ADVICE[late.kind]
    if late.kind.startswith("foreign"):
        return "its region renews it"
    name = late.name.rpartition("/")[2]
    issue = f"felix identity issue {name} --kind {late.kind}"
    if late.stage == Stage.EXPIRED.name.lower() or late.kind == "approver":
        return issue
    return f"it renews itself when it is used and may; else {issue}"


def _row(late: _Late) -> dict[str, Any]:
    return {
        "name": late.name,
        "type": late.kind,
        "not_after_ms": late.not_after_ms,
        "stage": late.stage,
        "advice": _advice(late),
    }
