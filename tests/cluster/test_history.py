"""The judge of a replicated shard takes a history in which nothing went wrong, and refuses each of these by the name of the rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from cluster.history import RULES, Acknowledged, History, Seen, Sent, Told


@dataclass
class Case:
    """Two writers, a and b, whose records stand in turn: a0 b0 a1 b1 a2 b2. Each was sent at twice its offset and acknowledged a second later; two
    readers were given all of it; the shard was led by b1 in epoch 1, then by b2 in epoch 2."""

    history: History = field(default_factory=History)
    stored: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        history = self.history
        for offset in range(6):
            writer, number = "ab"[offset % 2], offset // 2
            history.sent.append(Sent(writer, number, 2.0 * offset))
            history.acknowledged.append(Acknowledged(writer, number, offset, 2.0 * offset + 1))
            self.stored.append(Seen(offset, writer, number, 1_000 + offset))
        for reader in ("r1", "r2"):
            history.read[reader] = [each._replace(at=100.0) for each in self.stored]
        history.told["c1"] = [Told(3.5, "b1", 1, 2), Told(8.5, "b2", 2, 4), Told(50.0, "b2", 2, 6)]


BAD: dict[str, tuple[str, Callable[[Case], object]]] = {}


def bad(rule: str) -> Callable[[Callable[[Case], object]], Callable[[Case], object]]:
    def named(spoil: Callable[[Case], object]) -> Callable[[Case], object]:
        BAD[spoil.__name__] = (rule, spoil)
        return spoil

    return named


@bad("lost")
def the_last_acknowledged_record_is_lost(case: Case) -> None:
    del case.stored[5]


@bad("lost")
def an_acknowledged_record_is_lost_and_its_place_taken(case: Case) -> None:
    case.history.sent.append(Sent("c", 0, 4.0))
    case.stored[2] = Seen(2, "c", 0, 1_002)


@bad("hole")
def an_offset_is_missing(case: Case) -> None:
    del case.stored[3]


@bad("hole")
def the_beginning_is_missing(case: Case) -> None:
    del case.stored[0]


@bad("doubled")
def a_record_was_sent_again_and_stands_twice(case: Case) -> None:
    case.stored.append(Seen(6, "b", 2, 1_006))


@bad("doubled")
def a_record_in_the_middle_stands_twice(case: Case) -> None:
    case.stored.append(Seen(6, "a", 1, 1_006))


@bad("reordered")
def two_records_of_a_writer_changed_places(case: Case) -> None:
    case.stored[0] = case.stored[0]._replace(number=1)
    case.stored[2] = case.stored[2]._replace(number=0)


@bad("skipped")
def a_record_that_nobody_acknowledged_is_left_out_before_a_later_one(case: Case) -> None:
    case.history.sent += [Sent("c", 0, 20.0), Sent("c", 1, 20.0)]
    case.stored.append(Seen(6, "c", 1, 1_006))


@bad("invented")
def a_record_that_nobody_sent_stands_there(case: Case) -> None:
    case.stored.append(Seen(6, "x", 0, 1_006))


@bad("invented")
def a_reader_is_given_what_nobody_sent(case: Case) -> None:
    case.history.read["r1"].append(Seen(6, "x", 7, 1_006, 100.0))


@bad("moved")
def a_record_stands_elsewhere_than_it_was_told(case: Case) -> None:
    case.history.acknowledged[4] = case.history.acknowledged[4]._replace(offset=7)


@bad("acknowledged twice")
def two_records_were_told_the_same_place(case: Case) -> None:
    case.history.acknowledged[4] = case.history.acknowledged[4]._replace(offset=3)


@bad("acknowledged twice")
def a_record_was_told_two_places(case: Case) -> None:
    case.history.acknowledged.append(Acknowledged("a", 2, 6, 30.0))


@bad("acknowledged before sent")
def an_answer_came_before_the_question(case: Case) -> None:
    case.history.acknowledged[4] = case.history.acknowledged[4]._replace(at=0.5)


@bad("against real time")
def a_later_record_stands_before_one_that_was_acknowledged(case: Case) -> None:
    case.history.sent.append(Sent("c", 0, 30.0))
    case.stored[3:] = [
        Seen(3, "c", 0, 1_003), *(each._replace(offset=each.offset + 1) for each in case.stored[3:])
    ]  # fmt: skip


@bad("time runs back")
def a_record_is_older_than_the_one_before_it(case: Case) -> None:
    case.stored[4] = case.stored[4]._replace(append_ms=900)


@bad("read out of order")
def a_reader_is_given_a_record_again(case: Case) -> None:
    case.history.read["r2"].insert(3, case.history.read["r2"][2])


@bad("read out of order")
def a_reader_goes_back(case: Case) -> None:
    case.history.read["r2"] += case.history.read["r2"][3:]


@bad("read with a hole")
def a_reader_misses_a_record(case: Case) -> None:
    del case.history.read["r1"][3]


@bad("read with a hole")
def a_reader_misses_the_first_record(case: Case) -> None:
    del case.history.read["r1"][0]


@bad("read and gone")
def a_reader_saw_what_was_cut_later(case: Case) -> None:
    case.history.sent.append(Sent("c", 0, 30.0))
    case.history.read["r1"].append(Seen(6, "c", 0, 1_006, 100.0))


@bad("read and changed")
def a_reader_saw_what_another_leader_wrote_anew(case: Case) -> None:
    case.history.sent.append(Sent("c", 0, 10.0))
    case.history.read["r1"][5] = Seen(5, "c", 0, 1_005, 100.0)


@bad("read and changed")
def the_time_of_a_record_is_another_later(case: Case) -> None:
    case.history.read["r1"][2] = case.history.read["r1"][2]._replace(append_ms=1_001)


@bad("two orders")
def two_readers_saw_two_orders(case: Case) -> None:
    seen = case.history.read["r2"]
    seen[2], seen[3] = seen[3]._replace(offset=2), seen[2]._replace(offset=3)


@bad("read before sent")
def a_reader_saw_a_record_before_it_was_sent(case: Case) -> None:
    case.history.read["r1"][4] = case.history.read["r1"][4]._replace(at=1.0)


@bad("two leaders")
def two_brokers_lead_one_epoch(case: Case) -> None:
    case.history.told["c2"] = [Told(60.0, "b1", 2, 6)]


@bad("epoch falls")
def a_deposed_leader_answers(case: Case) -> None:
    case.history.told["c1"].append(Told(60.0, "b1", 1, 6))


@bad("end falls")
def the_end_goes_back(case: Case) -> None:
    case.history.told["c1"] += [Told(9.0, "b2", 2, 5), Told(9.0, "b2", 2, 4)]


@bad("end gone")
def an_end_was_told_that_never_was(case: Case) -> None:
    case.history.told["c1"].append(Told(60.0, "b2", 2, 7))


@bad("stale end")
def a_leader_does_not_know_what_was_acknowledged(case: Case) -> None:
    case.history.told["c1"] = [Told(60.0, "b3", 3, 5)]


def test_a_history_in_which_nothing_went_wrong_is_taken() -> None:
    case = Case()
    case.history.check(case.stored)


def test_what_was_sent_and_never_answered_may_stand_or_not() -> None:
    case = Case()
    case.history.sent += [Sent("a", 3, 40.0), Sent("b", 3, 40.0)]
    case.history.check(case.stored)
    case.history.check([*case.stored, Seen(6, "b", 3, 1_006)])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_refused_by_name(name: str) -> None:
    rule, spoil = BAD[name]
    case = Case()
    spoil(case)
    with pytest.raises(AssertionError) as told:
        case.history.check(case.stored)
    assert rule in [line.split(":")[0] for line in str(told.value).splitlines()]


def test_every_rule_has_a_history_that_breaks_it() -> None:
    assert {rule for rule, _ in BAD.values()} == set(RULES)
