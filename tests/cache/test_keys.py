"""The index of keys against a set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from region.cache import keys
from region.cache.keys import KeyIndex

KEYS = st.binary(min_size=1, max_size=3)


@given(
    st.lists(st.tuples(KEYS, st.booleans()), max_size=60),
    st.binary(max_size=2),
    st.one_of(st.just(b""), KEYS),
    st.integers(1, 9),
    st.sampled_from([0, 4, 256]),
)
def test_pages_are_those_of_a_sorted_set(
    changes: list[tuple[bytes, bool]], prefix: bytes, after: bytes, limit: int, unsorted_max: int
) -> None:
    before = keys.UNSORTED_MAX, keys.GONE_MIN
    keys.UNSORTED_MAX, keys.GONE_MIN = unsorted_max, 3  # type: ignore[misc]
    try:
        index, model = KeyIndex(), set[bytes]()
        for at, (key, present) in enumerate(changes):
            if present and key not in model:
                index.add(key)
                model.add(key)
            elif not present and key in model:
                index.discard(key)
                model.discard(key)
            if at % 7 == 0:
                index.page(b"", b"", 5)
        wanted = [key for key in sorted(model) if key.startswith(prefix) and key > after]
        assert index.page(prefix, after, limit) == wanted[:limit]
        assert len(index) == len(model)
    finally:
        keys.UNSORTED_MAX, keys.GONE_MIN = before  # type: ignore[misc]
