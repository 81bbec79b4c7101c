"""F19: a grant that writes into any stream of the destination, of which neither its policy nor its operator knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from approvers import roots, with_approvals
from departures import DAY, terms

from cli import terms as shown
from cli.terms import confirm, terms_rows
from felix.errors import RequestError
from felix.names import SpiffeId, StreamName
from keys.signing import SigningKey
from policy.grant import (
    Allowed,
    Attempt,
    DenyEntry,
    GrantBook,
    RefusalKind,
    sign_deny,
    sign_export,
    sign_import,
)
from policy.residency import ResidencyError, ResidencyPolicy, parse_policy
from policy.signed import Purpose, SignedDocument, canonical, sign
from policy.terms import Basis, GrantTerms
from policy.transform import Format, KeyRule, TransformSpec, build_spec

Tally = Callable[[str, int], None]
NOW = 10 * DAY
US, EU = (SigningKey.from_seed(bytes([seed]) * 32).private_key for seed in (1, 2))
TRUSTED = {
    "us-east": (US.public_key().public_bytes_raw(),),
    "eu-west": (EU.public_key().public_bytes_raw(),),
}
ACCEPTED_BY = "spiffe://eu-west.acme/operator/bob"
ATTEMPT = Attempt(
    StreamName.parse("acme/ops/departures"), "us-east", "eu-west", SpiffeId.parse("spiffe://us-east.acme/bridge/us-to-eu")
)  # fmt: skip
EXAMPLES = Path(__file__).parents[2] / "examples" / "regions"


def policy(region: str, streams: str = "[acme/ops/*]", more: str = "") -> ResidencyPolicy:
    exporting = region == "us-east"
    return parse_policy(
        f"""
version: 1
name: {region}
revision: 1
region: {region}
regions:
  us-east: {{country: US, jurisdiction: US}}
  eu-west: {{country: IE, jurisdiction: EU}}
classes:
  operational: {{streams: {streams}}}
{"exports" if exporting else "imports"}:
  - name: rule
    classes: [operational]
    {"to" if exporting else "from"}: {{regions: [{"eu-west" if exporting else "us-east"}]}}
    bases: [scc]
    lifetime: 90d
{more}""",
        region,
    )


def halves(wanted: GrantTerms, imports: ResidencyPolicy) -> tuple[SignedDocument, SignedDocument]:
    export = sign_export(wanted, policy("us-east"), US, NOW)
    return export, sign_import(export, imports, EU, TRUSTED, ACCEPTED_BY, NOW)


def test_the_import_policy_is_asked_about_the_name_in_the_destination(tally: Tally) -> None:
    """`acme/ops/*` may come in; `bank/ledger/entries` is not of it, under whichever name it left."""
    wanted = terms(destination_stream="bank/ledger/entries")
    with pytest.raises(ResidencyError, match="bank/ledger/entries has no class in the policy"):
        halves(wanted, policy("eu-west"))
    forbidden = policy(
        "eu-west", "['*/*/*']", "deny:\n  - {name: ours, streams: [bank/*/*], because: it is ours}\n"
    )
    with pytest.raises(ResidencyError, match="bank/ledger/entries must not come in from us-east: it is ours"):
        halves(wanted, forbidden)
    # Both halves signed all the same (a destination whose policy was wider then): its broker refuses now.
    export, accepted = halves(wanted, policy("eu-west", "['*/*/*']"))
    book = GrantBook(with_approvals(export, accepted), TRUSTED, roots())
    assert isinstance(book.check(ATTEMPT, policy("eu-west", "['*/*/*']"), NOW), Allowed)
    for held, kind in ((policy("eu-west"), RefusalKind.AGAINST_POLICY), (forbidden, RefusalKind.DENIED)):
        found = book.check(ATTEMPT, held, NOW)
        assert not isinstance(found, Allowed) and found.kind is kind
    # A deny entry of the destination names the stream as it is called there.
    entry = DenyEntry(streams="bank/*/*", peer="*", region="eu-west", sequence=1, at=NOW, by="bob")
    denied = book.including([sign_deny(entry, EU)]).check(ATTEMPT, None, NOW)
    assert not isinstance(denied, Allowed) and denied.kind is RefusalKind.DENIED
    assert "as bank/ledger/entries" in denied.sentence
    tally("targets outside of the import policy", 5)


@pytest.mark.parametrize("name", ["felix/system/transactions", "felix/a/b"])
def test_no_terms_name_the_systems_own_streams(name: str) -> None:
    for changes in (
        {"destination_stream": name},
        {"stream": name},
        {"stream": name, "destination_stream": "acme/ops/a"},
    ):
        with pytest.raises(RequestError, match="the system's own"):
            terms(**changes)
    # Written by hand and signed with the region's own key, they are no document either.
    honest = sign_export(terms(), policy("us-east"), US, NOW)
    body = msgspec.json.decode(honest.body)
    body["terms"]["destination_stream"] = name
    book = GrantBook([sign(Purpose.EXPORT, "us-east", canonical(body), US)], TRUSTED)
    assert "the system's own" in book.problems[0].sentence


def test_a_pattern_cannot_include_the_systems_own_streams() -> None:
    for pattern in ("*/*/*", "fel*/ops/*", "*/system/transactions"):
        with pytest.raises(RequestError, match="the system's own"):
            terms(stream=pattern, wildcard=True)


# -- accept and approve show everything ----------------------------------------------------------------

FULL = terms(
    destination_stream="acme/ops/arrivals", mechanism="module 2", transfer_assessment="TIA-9", categories=("crew", "seats"),
    rate_bytes=5_000_000, budget_bytes=10_000_000, onward=True,
    transform=build_spec(
        keep=["flight"], mask=["card:4"], hash_=["seat"], pseudonymize=["tailnum"], drop=["hour"],
        filter_='origin == "EWR"', key=KeyRule.HASH, headers=["kind", "tenant"], trace=True,
    ),
)  # fmt: skip


def test_every_term_is_shown_to_who_signs(tally: Tally) -> None:
    """A change of any term changes what is shown: no term hides."""
    variants: dict[str, Any] = {
        "stream": "acme/ops/other", "destination_stream": "acme/ops/elsewhere", "to_region": "ap-south", "purpose": "other",
        "bridge": "spiffe://us-east.acme/bridge/other", "basis": Basis.BCR, "mechanism": "module 3", "reference": "R-9",
        "transfer_assessment": "TIA-1", "categories": ("crew",), "exporter": "X", "importer": "Y", "owner": "Z",
        "drawn_up_by": "spiffe://us-east.acme/operator/other", "not_before": 1_000, "expires": 79 * DAY, "rate_bytes": 0,
        "budget_bytes": 0, "onward": False,
    }  # fmt: skip
    spec: dict[str, Any] = {
        "fields": FULL.transform.fields[1:], "filter": "", "key": KeyRule.KEEP, "headers": (), "trace": False,
    }  # fmt: skip
    changed = [msgspec.structs.replace(FULL, **{name: value}) for name, value in variants.items()]
    changed += [
        msgspec.structs.replace(FULL, transform=msgspec.structs.replace(FULL.transform, **{name: value}))
        for name, value in spec.items()
    ]
    changed += [
        msgspec.structs.replace(FULL, transform=TransformSpec(format=Format.OPAQUE)),
        terms(stream="acme/ops/*", wildcard=True),
        msgspec.structs.replace(FULL, from_region="ap-south", bridge="spiffe://ap-south.acme/bridge/b", drawn_up_by="spiffe://ap-south.acme/operator/o"),
    ]  # fmt: skip
    hash_row = ("terms hash", FULL.hash().hex())
    assert hash_row in terms_rows(FULL)
    shown_of_full = [row for row in terms_rows(FULL) if row[0] != "terms hash"]
    for each in changed:
        assert [row for row in terms_rows(each) if row[0] != "terms hash"] != shown_of_full, each
    # Nothing else is a term: a new field must be added to what is shown, and here.
    named = {"version", "from_region", "transform", "wildcard", *variants}
    assert named == {field.name for field in msgspec.structs.fields(GrantTerms)}
    assert {"format", *spec} == {field.name for field in msgspec.structs.fields(TransformSpec)}
    tally("terms that were changed", len(changed))


@pytest.mark.parametrize(
    ("answer", "signs"), [("y\n", True), ("yes\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_nothing_is_signed_unless_a_person_says_yes(
    answer: str, signs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    import typer

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(shown.sys, "stdin", Terminal(answer))
    if signs:
        confirm("Sign?", False)
    else:
        with pytest.raises(typer.Exit):
            confirm("Sign?", False)
    monkeypatch.setattr(shown.sys, "stdin", io.StringIO(answer))
    with pytest.raises(RequestError, match="no terminal to ask at"):
        confirm("Sign?", False)
    confirm("Sign?", True)
