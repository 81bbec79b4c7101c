from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest
from departures import DAY, terms

from felix.errors import RequestError
from felix.names import StreamName
from policy.terms import Basis, GrantTerms, grant_id, pseudonym_scope
from policy.transform import build_spec


def test_the_hash_is_that_of_sorted_compact_json() -> None:
    value = terms()
    again = json.dumps(
        json.loads(value.canonical_bytes()), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    assert value.canonical_bytes() == again.encode()
    assert value.hash() == hashlib.sha256(again.encode()).digest()
    assert msgspec.json.decode(value.canonical_bytes(), type=GrantTerms) == value


def test_any_difference_in_the_terms_is_another_hash_and_id() -> None:
    hashes = {
        terms().hash(),
        terms(purpose="billing").hash(),
        terms(expires=80 * DAY + 1).hash(),
        terms(onward=True).hash(),
        terms(transform=build_spec(pseudonymize=["tailnum"])).hash(),
        terms(destination_stream="acme/ops/arrived").hash(),
    }
    assert len(hashes) == 6
    ids = {grant_id(found) for found in hashes}
    assert len(ids) == 6
    assert all(len(found) == 18 and found.startswith("g-") for found in ids)


def test_the_destination_has_the_same_name_unless_another_is_given() -> None:
    assert terms().destination_stream == "acme/ops/departures"
    assert terms() == terms(destination_stream="acme/ops/departures")
    here = StreamName.parse("acme/ops/departures")
    assert str(terms(destination_stream="acme/us/departures").destination_of(here)) == "acme/us/departures"
    assert terms(stream="acme/ops/*", wildcard=True).destination_of(here) == here


def test_pseudonyms_survive_renewal_and_differ_by_destination_and_purpose() -> None:
    assert pseudonym_scope(terms()) == pseudonym_scope(terms(expires=90 * DAY, reference="SCC-2027-001"))
    assert pseudonym_scope(terms()) != pseudonym_scope(terms(purpose="billing"))
    assert pseudonym_scope(terms()) != pseudonym_scope(terms(to_region="ap-south"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stream": "acme/ops/*"}, "is a pattern; a grant for several streams needs the wildcard flag"),
        ({"wildcard": True}, "is one exact name, so the wildcard flag must not be set"),
        (
            {"stream": "acme/ops/*", "wildcard": True, "destination_stream": "acme/us/*"},
            "keeps the streams' names",
        ),
        ({"stream": "acme/ops"}, "is not a name pattern"),
        ({"destination_stream": "acme/ops"}, "is not a name"),
        ({"to_region": "us-east"}, "source and destination are both us-east"),
        ({"to_region": "EU"}, "is not a region or mesh name"),
        ({"bridge": "spiffe://us-east.acme/client/x"}, "is not a bridge identity of us-east"),
        ({"bridge": "spiffe://eu-west.acme/bridge/x"}, "is not a bridge identity of us-east"),
        ({"expires": 0}, "it would expire before it begins"),
        ({"expires": 1 << 53}, "`int` <= 9007199254740991"),
        ({"not_before": -1}, "`int` >= 0"),
        ({"drawn_up_by": "alice"}, "is not a identity"),
        ({"drawn_up_by": "spiffe://eu-west.acme/operator/alice"}, "is not an operator of us-east"),
        ({"drawn_up_by": "spiffe://us-east.acme/approver/alice"}, "is not an operator of us-east"),
        ({"drawn_up_by": "spiffe://us-east.umbrella/operator/alice"}, "is not an operator of us-east"),
        ({"stream": "felix/system/transactions"}, "can name streams of felix, which are the system's own"),
        (
            {"destination_stream": "felix/system/transactions"},
            "can name streams of felix, which are the system's own",
        ),
        ({"stream": "*/ops/x", "wildcard": True}, "can name streams of felix, which are the system's own"),
        ({"stream": "fel*/ops/x", "wildcard": True}, "can name streams of felix, which are the system's own"),
        ({"reference": ""}, "the basis scc needs a reference"),
        ({"purpose": ""}, "length >= 1"),
        ({"purpose": "a\nb"}, "matching regex"),
        ({"purpose": "a\n"}, "matching regex"),
        ({"purpose": "a\udcff"}, "one of its texts is not Unicode"),
        ({"owner": "x" * 257}, "length <= 256"),
        ({"categories": ("c",) * 33}, "length <= 32"),
    ],
)
def test_terms_that_cannot_hold_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        terms(**changes)
    assert sentence in str(caught.value)


def test_every_basis_is_named_with_its_article() -> None:
    assert Basis.ADEQUACY.article == "45"
    assert Basis.DEROGATION.article == "49"
    assert {basis for basis in Basis if not basis.article} == {Basis.NOT_PERSONAL, Basis.SAME_JURISDICTION}
    assert terms(basis=Basis.NOT_PERSONAL, reference="").reference == ""
