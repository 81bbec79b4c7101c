"""The intake serves connections round-robin: order, bounds, and a quiet connection does not wait for another's backlog."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from felix.transport.intake import (
    ALONE_S,
    ARRIVAL_BYTES,
    HELD_BYTES_MAX,
    QUANTUM_BYTES,
    ROUND_BYTES,
    Arrival,
    Intake,
)

PEER = ("127.0.0.1", 4433)
READ_BYTES = 64 * 1024


def read(size: int, mark: int = 0) -> Arrival:
    return Arrival(mark.to_bytes(8) + bytes(max(0, size - 8)), size, PEER)


def test_a_quiet_connection_is_served_before_the_backlog_of_another() -> None:
    intake: Intake[str] = Intake()
    for n in range(50):
        assert intake.put("busy", read(READ_BYTES, n))
    assert intake.put("quiet", read(100))
    served = list(intake.round())
    assert [key for key, _ in served] == ["quiet", "busy"]
    assert sum(len(each.data) for each in served[1][1]) <= QUANTUM_BYTES


def test_busy_connections_are_served_in_rotation_and_a_round_ends() -> None:
    intake: Intake[int] = Intake()
    for n in range(30):
        for key in range(10):
            assert intake.put(key, read(READ_BYTES, n))
    served: list[int] = []
    for _ in range(5):
        part = list(intake.round())
        assert sum(len(each.data) for _, taken in part for each in taken) <= ROUND_BYTES
        served += [key for key, _ in part]
    assert sorted(served) == sorted([*range(10), *range(10)]), "each twice, none thrice"


def test_of_a_burst_each_takes_its_part_at_once_and_one_that_is_alone_takes_all() -> None:
    intake: Intake[str] = Intake()
    assert intake.takes("beside", 100, 0.0)
    taken = [intake.takes("busy", READ_BYTES, 0.0) for _ in range(20)]
    assert taken == [True] + [False] * 19
    assert intake.takes("beside", 100, 0.0)
    assert list(intake.burst_ended()) == ["beside", "busy"]
    assert intake.takes("busy", READ_BYTES, ALONE_S / 2), "a part of each burst"
    intake.put("busy", read(READ_BYTES))
    intake.burst_ended()
    assert not intake.takes("busy", 100, 2 * ALONE_S), "what came before it waits"
    list(intake.round())
    assert all(intake.takes("busy", READ_BYTES, 2 * ALONE_S) for _ in range(20))
    assert intake.takes("beside", 100, 2 * ALONE_S)
    assert not intake.takes("busy", READ_BYTES, 2 * ALONE_S)


def test_who_has_more_than_its_share_loses_and_nobody_else() -> None:
    intake: Intake[str] = Intake(held_bytes_max=1_000_000)
    for n in range(40):
        intake.put("hog", read(READ_BYTES, n))
    assert intake.dropped_bytes and intake.held_bytes <= 1_000_000
    before = intake.dropped_bytes
    for n in range(7):
        assert intake.put("other", read(READ_BYTES, n)), "half of all is its share"
    assert intake.dropped_bytes > before and intake.held_bytes <= 1_000_000
    assert not intake.put("hog", read(READ_BYTES))
    found = defaultdict(list)
    while intake:
        for key, taken in intake.round():
            found[key] += [int.from_bytes(each.data[:8]) for each in taken]
    assert found["other"] == list(range(7))
    assert found["hog"] == list(range(len(found["hog"]))), "the newest were dropped"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 4), st.integers(1, READ_BYTES)),
        st.tuples(st.just("round"), st.just(0), st.just(0)),
        st.tuples(st.just("forget"), st.integers(0, 4), st.just(0)),
    ),
    max_size=200,
)


@given(STEPS, st.integers(200_000, 2_000_000))
def test_order_and_bounds_hold_whatever_comes(steps: list[tuple[str, int, int]], bound: int) -> None:
    intake: Intake[int] = Intake(held_bytes_max=bound)
    waiting: dict[int, set[int]] = defaultdict(set)
    mark = came = served = refused = 0
    forgets = False

    def serve() -> None:
        nonlocal served
        keys = set()
        for key, taken in intake.round():
            assert key not in keys and taken, "one part each"
            keys.add(key)
            marks = [int.from_bytes(each.data[:8]) for each in taken]
            assert marks == sorted(marks) and waiting[key].issuperset(marks)
            waiting[key] = {mark for mark in waiting[key] if mark > marks[-1]}
            served += sum(len(each.data) for each in taken)

    for what, key, size in steps:
        if what == "put":
            mark += 1
            arrival = read(size, mark)
            came += len(arrival.data)
            if intake.put(key, arrival):
                waiting[key].add(mark)
            else:
                refused += len(arrival.data)
        elif what == "forget":
            forgets = True
            intake.forget(key)
            waiting.pop(key, None)
        else:
            serve()
        assert 0 <= intake.held_bytes <= bound
    for _ in range(1_000):
        if not intake:
            break
        serve()
    assert not intake and intake.held_bytes == 0
    assert intake.dropped_bytes >= refused
    assert served + intake.dropped_bytes == came or forgets


def test_the_bound_holds_a_window_of_the_smallest_datagrams() -> None:
    assert HELD_BYTES_MAX // (ARRIVAL_BYTES + 40) > 100_000
