"""What crossed before: a set of offsets as bits, and which incarnations count for which."""

from __future__ import annotations

import msgspec
import pytest
from audit_log import Link
from hypothesis import given
from hypothesis import strategies as st

from audit import crossed as crossed_module
from audit.crossed import CHUNK, PAGE_CHUNKS, PAGE_RUN_CHUNKS, Crossed, OffsetSet, Page
from audit.leaf import ENTRY_BYTES, Leaf, decode_leaf, encode_leaf
from audit.position import ShardName
from felix.batch import OFFSET_MAX
from felix.errors import ProtocolError

OLD, CUT, AGAIN = b"old" + bytes(13), b"cut" + bytes(13), b"again" + bytes(11)


@given(st.lists(st.tuples(st.integers(0, 3 * CHUNK), st.integers(1, 1 << 90))), st.integers(0, 4 * CHUNK))
def test_a_set_of_offsets_is_a_set(added: list[tuple[int, int]], bound: int) -> None:
    held, model = OffsetSet(), set()
    for first, mask in added:
        held.add(first, mask)
        model |= {first + at for at in range(mask.bit_length()) if mask >> at & 1}
    assert held.next == max(model, default=-1) + 1
    for first, mask in (*added, (bound, (1 << 70) - 1)):
        wanted = sum(1 << at for at in range(mask.bit_length()) if mask >> at & 1 and first + at in model)
        assert held.common(first, mask) == wanted
    assert all(offset in held for offset in model) and (bound in held) == (bound in model)
    below = OffsetSet()
    below.update(held, bound)
    page = int.from_bytes(below.page(0, held.next or 1), "little")
    assert page == sum(1 << offset for offset in model if offset < bound)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, CHUNK - 1, CHUNK, 3 * CHUNK])), min_size=1),
    st.integers(0, 12),
)
def test_pages_of_a_set_are_the_set_and_each_is_bounded(added: list[tuple[int, int]], chunk: int) -> None:
    held = OffsetSet()
    for number, count in added:
        held.add(number * CHUNK, (1 << count) - 1)
    told, end = OffsetSet(), chunk
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossed_module, "PAGE_CHUNKS", 2)
        patch.setattr(crossed_module, "PAGE_RUN_CHUNKS", 3)
        pages = list(held.pages(chunk))
        for page in pages:
            assert all(number >= end for number in (*page.numbers, *(first for first, _ in page.runs)))
            told.take(page)
            end = page.end
    assert [page.end > 0 for page in pages] == [True] * (len(pages) - 1) + [False]
    start, most = chunk * CHUNK, 13 * CHUNK
    assert told.page(start, most) == held.page(start, most)
    assert told.next == (held.next if held.next > start else 0)


@pytest.mark.parametrize(
    "page",
    [
        Page([(0, PAGE_RUN_CHUNKS + 1)], [], b"", 0),
        Page([(0, 1 << 62), (0, -(1 << 62))], [], b"", 0),
        Page([(-1, 1)], [], b"", 0),
        Page([], [0], b"", 0),
        Page([], [], bytes(CHUNK // 8), 0),
        Page([], [-1], bytes(CHUNK // 8), 0),
        Page([], [0] * (PAGE_CHUNKS + 1), bytes((PAGE_CHUNKS + 1) * CHUNK // 8), 0),
    ],
)
def test_a_page_that_says_more_than_pages_do_is_refused(page: Page) -> None:
    with pytest.raises(ProtocolError):
        OffsetSet().take(page)


def under(incarnation: bytes, leaves: list[Leaf]) -> list[Leaf]:
    return [
        Leaf(msgspec.structs.replace(leaf.header, incarnation=incarnation), leaf.entries) for leaf in leaves
    ]


def test_a_resend_may_bring_what_stayed_and_nothing_else() -> None:
    link, crossed = Link(), Crossed()
    first = under(OLD, link.intent(4, withhold=(1, 2)))
    (answer,) = under(OLD, [link.ack(first)])
    assert [crossed.take(leaf) for leaf in (*first, answer)] == [0] * len([*first, answer])
    crossed.derive(AGAIN, OLD, None)
    assert [offset in crossed.before(ShardName.of(first[0].header), AGAIN) for offset in range(5)] == [
        True, False, False, True, False,
    ]  # fmt: skip
    link.offset = 0
    assert sum(crossed.take(leaf) for leaf in under(AGAIN, link.intent(4, withhold=(0, 3)))) == 0
    link.offset = 0
    assert sum(crossed.take(leaf) for leaf in under(AGAIN, link.intent(4))) == 2
    # Another destination stream has its own.
    link.offset = 0
    other = [
        Leaf(msgspec.structs.replace(leaf.header, destination_stream="acme/ops/copy"), leaf.entries)
        for leaf in under(AGAIN, link.intent(4))
    ]
    assert sum(crossed.take(leaf) for leaf in other) == 0


def test_an_announcement_without_an_answer_did_not_cross() -> None:
    link, crossed = Link(), Crossed()
    for leaf in under(OLD, link.intent(4)):
        crossed.take(leaf)
    crossed.derive(AGAIN, OLD, None)
    link.offset = 0
    assert sum(crossed.take(leaf) for leaf in under(AGAIN, link.intent(4))) == 0


def test_what_lies_behind_an_accepted_truncation_is_other_records() -> None:
    link, crossed = Link(), Crossed()
    for leaf in under(OLD, link.delivery(link.intent(4))):
        crossed.take(leaf)
    crossed.derive(CUT, OLD, 2)
    crossed.derive(AGAIN, CUT, None)
    link.offset = 2
    assert sum(crossed.take(leaf) for leaf in under(CUT, link.delivery(link.intent(2)))) == 0
    link.offset = 0
    assert sum(crossed.take(leaf) for leaf in under(AGAIN, link.delivery(link.intent(6)))) == 4


def test_a_range_that_says_more_than_it_lists_takes_no_more_memory() -> None:
    """An envelope may cover 2^32 offsets and a leaf 2^63, with two records in them: no mask is made of all of it."""
    offsets = (7, 8, 1 << 20, OFFSET_MAX - 1)
    link, crossed = Link(), Crossed()
    (leaf,) = link.delivery(link.intent(len(offsets)))
    entries = b"".join(
        offset.to_bytes(8, "big") + leaf.entries[at * ENTRY_BYTES + 8 : (at + 1) * ENTRY_BYTES]
        for at, offset in enumerate(offsets)
    )
    header = msgspec.structs.replace(leaf.header, first_offset=offsets[0], last_offset=offsets[-1])
    wide = decode_leaf(encode_leaf(Leaf(header, entries)))
    assert crossed.take(under(OLD, [wide])[0]) == 0
    crossed.derive(AGAIN, OLD, None)
    before = crossed.before(ShardName.of(header), AGAIN)
    assert [offset in before for offset in (*offsets, 6, 9, offsets[-1] - 1)] == [True] * 4 + [False] * 3
    assert crossed.take(under(AGAIN, [wide])[0]) == len(offsets)
    # Nor of an offset that a truncation's document names.
    crossed.derive(CUT, OLD, OFFSET_MAX)
    assert crossed.take(under(CUT, [wide])[0]) == len(offsets)
