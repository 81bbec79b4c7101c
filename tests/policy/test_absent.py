"""Fields that a grant names and no record has."""

from __future__ import annotations

import pytest

from policy.absent import absent_fields
from policy.transform import TransformSpec, build_spec

RECORDS = [
    b'{"Name": "a", "MPAA Rating": null, "maker": {"id": 1}}',
    b'{"Name": "b", "items": [{"sku": 1}, {"size": 2}], "deep": {"er": []}}',
    b"no json",
]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (build_spec(pseudonymize=["Nmae"]), [("Nmae", "Name")]),
        (build_spec(drop=["name"]), [("name", "Name")]),
        (build_spec(pseudonymize=["Name"], drop=["maker.id", "items[].sku", "items[].size"]), []),
        (build_spec(hash_=["maker.ident"]), [("maker.ident", "maker.id")]),
        (build_spec(filter_='"MPAA Rating" == "R" and Nam == "b"'), [("Nam", "Name")]),
        (build_spec(keep=["zzzzzzzz"]), [("zzzzzzzz", "")]),
        (build_spec(filter_='Nmae == "a"', drop=["Nmae"]), [("Nmae", "Name")]),
        (TransformSpec(), []),
    ],
)
def test_a_field_that_no_record_has_is_named_with_the_likeliest(
    spec: TransformSpec, said: list[tuple[str, str]]
) -> None:
    assert absent_fields(spec, RECORDS) == tuple(said)


def test_where_nothing_can_be_read_nothing_is_said() -> None:
    spec = build_spec(drop=["Name"])
    assert absent_fields(spec, []) == absent_fields(spec, [b"\xff", b"[1]"]) == ()
    (one,) = absent_fields(build_spec(drop=["Nmae"]), RECORDS)
    assert str(one) == "No record of the sample has the field Nmae. Did you mean Name?"
