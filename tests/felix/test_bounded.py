"""A bounded map holds the last used, by number or by weight, and says what had to go."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from felix.bounded import BoundedMap


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from("puwl"), st.integers(0, 9), st.integers(1, 5)), max_size=60),
)
def test_what_is_held_is_what_a_plain_map_in_order_of_use_would_hold(
    most: int, steps: list[tuple[str, int, int]]
) -> None:
    gone: list[tuple[int, int]] = []
    held: BoundedMap[int, int] = BoundedMap(
        most, weigh=int, gone=lambda key, value: gone.append((key, value))
    )
    model: OrderedDict[int, int] = OrderedDict()
    lost: list[tuple[int, int]] = []
    for what, key, weight in steps:
        if what == "p":
            assert held.pop(key) == model.pop(key, None)
        elif what == "u":
            assert held.use(key) == model.get(key)
            if key in model:
                model.move_to_end(key)
        elif what == "l":
            assert held.look(key) == model.get(key)
        else:
            held.put(key, weight)
            model.pop(key, None)
            model[key] = weight
            while sum(model.values()) > most and len(model) > 1:
                lost.append(model.popitem(last=False))
        assert held.items() == list(model.items()) and gone == lost
        assert held.values() == list(model.values()) and list(held) == list(model)
        assert held.weight == sum(model.values()) and len(held) == len(model)
        assert (key in held) == (key in model)


def test_without_weights_each_entry_counts_one() -> None:
    held: BoundedMap[str, str] = BoundedMap(2)
    for key in "abc":
        held.put(key, key)
    assert list(held) == ["b", "c"] and held.weight == 2
    held.clear()
    assert not held and held.weight == 0
