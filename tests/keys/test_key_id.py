"""Key ids and whose they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from felix.batch import NO_KEY_ID
from felix.errors import Code, RequestError
from keys.errors import KeyScopeError
from keys.key_id import KeyKind, check_key_id, new_key_id, region_tag

REGIONS = st.sampled_from(["us-east", "eu-west", "ap-south", "a"])


@given(
    REGIONS, st.sampled_from(KeyKind), st.binary(min_size=11, max_size=11), REGIONS, st.sampled_from(KeyKind)
)
def test_an_id_belongs_to_one_region_and_kind(
    region: str, kind: KeyKind, random: bytes, other: str, other_kind: KeyKind
) -> None:
    key_id = new_key_id(region, kind, random)
    assert len(key_id) == 16
    assert key_id != NO_KEY_ID
    if (region, kind) == (other, other_kind):
        check_key_id(key_id, other, other_kind)
    else:
        with pytest.raises(KeyScopeError) as caught:
            check_key_id(key_id, other, other_kind)
        assert caught.value.code is Code.KEY_SCOPE


def test_the_layout_is_the_documented_one() -> None:
    # SHA-256 over b"felix/region-tag/1\0us-east" begins with these four bytes.
    assert region_tag("us-east").hex() == "115d793c"
    assert new_key_id("us-east", KeyKind.DATA, bytes(11)) == region_tag("us-east") + b"\x13" + bytes(11)


@pytest.mark.parametrize("key_id", [b"", bytes(15), bytes(17)])
def test_ids_of_another_length_are_refused(key_id: bytes) -> None:
    with pytest.raises(RequestError, match="16 bytes"):
        check_key_id(key_id, "us-east", KeyKind.DATA)
