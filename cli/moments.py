"""Moments as commands take them: a date, or a duration before or after now."""

from __future__ import annotations

from datetime import UTC, datetime

from felix.errors import RequestError
from policy.quantity import Duration


def parse_moment(text: str, now: int) -> int:
    """A duration from now (`90d`) or a date (`2027-01-31`), in ms. Raises RequestError(INVALID)."""
    return _moment(text, now, 1)


def parse_past(text: str, now: int) -> int:
    """So long ago (`90d`) or a date that is not to come, in ms. Raises RequestError(INVALID)."""
    moment = _moment(text, now, -1)
    if moment > now:
        raise RequestError(f"{text!r} is still to come.", hint="Write 30d for thirty days ago, or a date.")
    return moment


def parse_time(text: str, now: int) -> int:
    """So long ago (`90d`) or a date, which may be to come, in ms. Raises RequestError(INVALID)."""
    return _moment(text, now, -1)


def _moment(text: str, now: int, sign: int) -> int:
    try:
        return now + sign * Duration.parse(text)
    except RequestError as error:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise RequestError(
                f"{text!r} is neither a duration nor a date.", hint="Write 90d, or 2027-01-31."
            ) from error
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
