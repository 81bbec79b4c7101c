"""Who waits under which correlation id."""

from typing import cast

from felix.correlations import CORRELATION_MAX, Correlations
from felix.errors import FelixError, UnavailableError
from felix.frames import AppendedBody
from felix.messages import Answer, Done

LOST = UnavailableError("The session ended.")


class _Caller:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def answered(self, answer: Answer) -> None:
        self.heard.append(answer)

    def acknowledged(self, appended: AppendedBody) -> None:
        self.heard.append(appended)

    def refused(self, error: FelixError) -> None:
        self.heard.append(error)


def test_a_caller_hears_once_and_later_frames_are_ignored() -> None:
    waiting, caller = Correlations(), _Caller()
    number = waiting.register(caller)
    waiting.answered(number, Done())
    waiting.answered(number, Done())
    waiting.refused(number, LOST)
    assert caller.heard == [Done()] and not waiting


def test_a_watcher_hears_every_refusal_until_it_leaves() -> None:
    waiting, heard = Correlations(), list[FelixError]()
    number = waiting.watch(heard.append)
    waiting.refused(number, LOST)
    waiting.refused(number, LOST)
    waiting.unwatch(number)
    waiting.refused(number, LOST)
    assert heard == [LOST, LOST] and not waiting, "nothing is outstanding for who only watches"


def test_an_id_in_use_is_passed_over_when_the_numbers_begin_anew() -> None:
    waiting = Correlations()
    first = waiting.watch(lambda error: None)
    second = waiting.register(_Caller())
    waiting._last = CORRELATION_MAX
    assert (first, second, waiting.unused()) == (1, 2, 3)


def test_the_end_names_those_who_still_waited() -> None:
    waiting, caller, gone = Correlations(), _Caller(), _Caller()
    waiting.register(caller)
    waiting.forget(waiting.register(gone))
    assert [cast(_Caller, each) for each in waiting.end()] == [caller] and not waiting


def test_who_has_waited_longest_of_a_kind_is_known() -> None:
    waiting, one, other = Correlations(), _Caller(), _Caller()
    first, second = waiting.register(one), waiting.register(other)
    waiting.register(other)
    assert waiting.oldest(lambda pending: True) == first
    assert waiting.oldest(lambda pending: pending is other) == second
    waiting.forget(first)
    assert waiting.oldest(lambda pending: pending is one) == 0
