"""A page of a listing begins behind a name, so what comes and goes meanwhile neither hides an entry nor repeats one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from region import listing
from region.listing import Listing


def name(entry: str) -> str:
    return entry


@given(st.lists(st.text("abc", max_size=3), max_size=30), st.integers(1, 7), st.booleans())
def test_pages_together_are_the_listing(entries: list[str], limit: int, by_number: bool) -> None:
    found: list[str] = []
    after, more = "", True
    while more:
        if by_number:
            part = Listing(entries, name, after="", limit=limit, skip=len(found))
        else:
            part = Listing(entries, name, after=after, limit=limit, skip=99 if after else 0)
            if found and not after:
                break
        page, more, after = part.page(part.entries)
        assert len(page) <= limit and bool(after) <= more
        found += page
        if not page:
            break
    # An entry without a name could not be gone on behind.
    if "" not in entries:
        assert found == sorted(entries)


@given(st.sets(st.text("abc", min_size=1, max_size=3), min_size=1), st.data())
def test_what_comes_and_goes_between_pages_changes_nothing_for_the_rest(
    entries: set[str], data: st.DataObject
) -> None:
    first = Listing(entries, name, after="", limit=3)
    page, more, after = first.page(first.entries)
    changed = entries ^ data.draw(st.sets(st.text("abc", min_size=1, max_size=3)))
    second = Listing(changed, name, after=after, limit=1_000) if more else None
    rest, _, _ = second.page(second.entries) if second is not None else ([], False, "")
    stayed = sorted(entries & changed)
    assert [each for each in [*page, *rest] if each in stayed] == stayed


def test_a_page_holds_what_a_frame_does_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAGE_BYTES_MAX", 100)
    entries = ["a" * 60, "b" * 60, "c" * 300, "d"]
    after, pages = "", []
    for _ in entries:
        part = Listing(entries, name, after=after, limit=10)
        page, more, after = part.page(part.entries)
        pages.append("".join(each[0] for each in page))
    assert pages == ["a", "b", "c", "d"] and not more and not after
