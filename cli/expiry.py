"""Which certificates of a region near their end: from the files of its folder, and from what its broker has seen. Blocks on the disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from felix.errors import FelixError
from felix.expiry import Life, Notice, Stage, stage_of
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
        Notice(name, kind, life, stage)
        for name, (kind, life) in lives.items()
        if (stage := stage_of(life, now_ms)) > Stage.FRESH
    ]
    found += [
        Notice(each.name, each.kind, Life(0, each.not_after_ms), Stage[each.stage.upper()])
        for each in told
        if each.name not in lives or lives[each.name][1].not_after_ms < each.not_after_ms
    ]
    return [_row(notice) for notice in sorted(found, key=lambda notice: notice.life.not_after_ms)]


def _advice(notice: Notice) -> str:
    """What is to be done about it."""
    if notice.kind in _ADVICE:
        return _ADVICE[notice.kind]
    if notice.kind.startswith("foreign"):
        return "its region renews it"
    name = notice.name.rpartition("/")[2]
    issue = f"felix identity issue {name} --kind {notice.kind}"
    if notice.stage is Stage.EXPIRED or notice.kind == "approver":
        return issue
    return f"it renews itself when it is used and may; else {issue}"


def _row(notice: Notice) -> dict[str, Any]:
    return {
        "name": notice.name,
        "type": notice.kind,
        "not_after_ms": notice.life.not_after_ms,
        "stage": notice.stage.name.lower(),
        "advice": _advice(notice),
    }
