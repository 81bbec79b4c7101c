"""What comes and goes is said when it begins, and when it is over if it was said; not with each change."""

from felix.told import TOLD_AGAIN_S, Told


def test_what_begins_is_said_once_and_its_end_once() -> None:
    told = Told(lambda: 5.0)
    assert [told.begins(), told.begins(), told.ends(), told.ends()] == [True, False, True, False]


def test_what_begins_again_soon_is_not_said_nor_its_end_and_later_it_is() -> None:
    now_s = [5.0]
    told = Told(lambda: now_s[0])
    assert told.begins() and told.ends()
    now_s[0] += TOLD_AGAIN_S - 1
    assert not told.begins() and not told.ends()
    now_s[0] += 1
    assert told.begins() and told.ends()
