"""Other regions' logs take the room in which a region's bundle says where its keys ended: the refusal says whose, and the options that it names make room."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from audit_log import POLICY_SEEDS, key, region_bundle
from region_home import make_region
from typer.testing import CliRunner

from cli.region import app
from felix.errors import Code, RequestError
from felix.runtime.real import now_ms
from keys.bundle import (
    AUDIT_KEYS_MAX,
    FORMER_MAX,
    AuditKey,
    FormerKeys,
    KeyEnd,
    RegionBundle,
    check_update,
    decode_bundle,
    sign_bundle,
)
from keys.key_file import load_signing_key
from keys.signing import SigningKey
from region.bootstrap import trust_region
from region.folder import RegionFolder
from region.trust import signing_keys
from region.trust.bundle_room import require_room

PER_REGION = AUDIT_KEYS_MAX - 1
OWN = ["us-east.acme/audit", "us-east.acme/bridge/us-to-eu"]


def public(number: int) -> bytes:
    return SigningKey.from_seed(sha256(str(number).encode()).digest()).verify_key.public


def logs_of(region: str, number: int = PER_REGION) -> list[str]:
    """Of a region that takes as much room as it can: each log with the longest name."""
    return [f"{region}.acme/audit"] + [f"{region}.acme/bridge/{'b' * 58}{at:05d}" for at in range(number - 1)]


def former(logs: Sequence[str], number: int) -> FormerKeys:
    ends = tuple(KeyEnd(log, 5_000 + number, bytes(32)) for log in sorted(logs))
    return FormerKeys(policy_keys=(public(number),), receipt_keys=(public(1_000 + number),), ends=ends)


def changed_until_full(logs: Sequence[str]) -> tuple[RegionBundle, RequestError]:
    """The bundle that did not fit any more, and how it was refused."""
    bundle = region_bundle("us-east")
    for number in range(FORMER_MAX):
        bundle = bundle.with_former((*bundle.former, former(logs, number)))
        try:
            require_room(bundle, dropped=0)
        except RequestError as error:
            return bundle, error
        sign_bundle(bundle, key(POLICY_SEEDS["us-east"]))
    raise AssertionError("it fits")


def takes(error: RequestError, bundle: RegionBundle) -> RegionBundle:
    """The bundle with the first option of the hint."""
    *earlier, last = bundle.former
    option = error.hint.split(", which makes ")[0]
    domains = re.findall(r"--without (\S+)", option)
    if drop := re.search(r"--drop-earliest (\d+)", option):
        return bundle.with_former(bundle.former[int(drop[1]) :])
    left = tuple(end for end in last.ends if end.log.partition("/")[0] not in domains)
    return bundle.with_former((*earlier, msgspec.structs.replace(last, ends=left)))


@pytest.mark.parametrize(("hostile", "changes"), [(1, 8), (3, 2), (8, 1), (9, 0)])
def test_a_refusal_says_whose_logs_take_the_room_and_what_makes_some(hostile: int, changes: int) -> None:
    regions = [f"far-{letter}" for letter in "abcdefghi"[:hostile]]
    logs = [*OWN, *(log for region in regions for log in logs_of(region))]
    bundle, refused = changed_until_full(logs)
    assert refused.code is Code.CONFLICT and len(bundle.former) - 1 == changes
    for region in regions[:8]:
        assert f"{region}.acme ({PER_REGION} logs, " in refused.sentence
    assert ("2 more regions" in refused.sentence) == (hostile == 9)
    assert f"--without {regions[0]}.acme" in refused.hint and "--without us-east" not in refused.hint
    assert ("--drop-earliest 1" in refused.hint) == (changes > 0)
    followed = takes(refused, bundle)
    require_room(followed)
    sign_bundle(followed, key(POLICY_SEEDS["us-east"]))


def test_regions_that_no_leaf_names_are_left_out_first() -> None:
    """There was no grant with far-h and far-i, whose logs are fewer than the others'."""
    sizes = {f"far-{letter}": PER_REGION for letter in "abcdefg"} | {"far-h": 25, "far-i": 20}
    ends = former([*OWN, *(log for region, size in sizes.items() for log in logs_of(region, size))], 1)
    bundle = region_bundle("us-east").with_former((ends,))

    def left_out(dealt: set[str] | None) -> tuple[list[str], str]:
        with pytest.raises(RequestError) as refused:
            require_room(bundle, dealt=dealt)
        require_room(takes(refused.value, bundle))
        options = refused.value.hint.split(", which makes room")[0]
        return re.findall(r"--without (\S+)", options), refused.value.hint

    by_size, hint = left_out(None)
    assert by_size == ["far-a.acme"] and "there was no grant" not in hint
    first, hint = left_out({"us-east", *sizes} - {"far-h", "far-i"})
    assert first == ["far-h.acme"] and "audit log names far-h.acme: there was no grant" in hint
    assert left_out({"us-east", *sizes})[0] == by_size


def test_where_own_logs_take_the_room_the_earliest_changes_make_some() -> None:
    logs = logs_of("us-east")
    bundle, refused = changed_until_full(logs)
    assert "--without" not in refused.hint and "us-east.acme (31 logs" in refused.sentence
    require_room(takes(refused, bundle))
    with pytest.raises(RequestError) as again:
        require_room(bundle, dropped=3)
    assert "--drop-earliest 4" in again.value.hint, "those that were left out already are among them"


def test_ends_that_are_raised_say_so_too() -> None:
    logs = [log for letter in "abcdefghi" for log in logs_of(f"far-{letter}")]
    raised = former(logs, 1)
    held = [end for end in raised.ends if end.log.startswith(("far-a", "far-b"))]
    with pytest.raises(RequestError, match="ended in 279 logs") as refused:
        require_room(region_bundle("us-east").with_former((raised,)), 0, held=held)
    # What was there before stays, whatever is left out now.
    assert "--without far-c.acme, which makes room" in refused.value.hint
    assert "--drop-earliest" not in refused.value.hint


def add_bridges(folder: RegionFolder, to: RegionFolder) -> list[str]:
    """A region that is trusted adds bridges' logs by itself: no fingerprint is compared for these."""
    held = decode_bundle(folder.bundle.read_bytes()).bundle
    names = [f"eu-west.acme/bridge/{'b' * 58}{at:05d}" for at in range(AUDIT_KEYS_MAX - len(held.audit_keys))]
    more = tuple(AuditKey(name, "log", public(5_000 + at)) for at, name in enumerate(names))
    larger = msgspec.structs.replace(held, issued_ms=held.issued_ms + 1, audit_keys=(*held.audit_keys, *more))
    signed = sign_bundle(larger, load_signing_key(folder.policy_key))
    check_update(held, signed)
    trust_region(to, signed, now_ms())
    return names


def test_the_command_is_refused_before_it_writes_and_goes_on_with_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    us, eu = make_region(tmp_path, "us-east"), make_region(tmp_path, "eu-west")
    names = add_bridges(eu, us)
    ends = [KeyEnd(name, 7, bytes(32)) for name in names]
    monkeypatch.setattr(
        signing_keys,
        "_cosigned_ends",
        lambda folder, config, without: ([end for end in ends if end.log not in without], []),
    )
    command = ["change-signing-keys", "--region", "us-east", "--without", "us-east.acme/audit"]
    changes = 0
    while True:
        before = us.bundle.read_bytes()
        done = CliRunner().invoke(app, command)
        if done.exit_code:
            break
        changes += 1
    refused = done.exception
    assert isinstance(refused, RequestError) and refused.code is Code.CONFLICT and 0 < changes < FORMER_MAX
    assert us.bundle.read_bytes() == before and not list(us.root.rglob("new.*")), "nothing was written"
    assert "--without eu-west.acme" in refused.hint
    done = CliRunner().invoke(app, [*command, "--without", "eu-west.acme"])
    assert done.exit_code == 0, done.exception
    bundle = decode_bundle(us.bundle.read_bytes()).bundle
    assert len(bundle.former) == changes + 1 and not bundle.former[-1].ends
