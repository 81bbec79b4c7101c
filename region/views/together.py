"""Which streams are to be placed together: those that dead letters go between.

Of several brokers the one that leads a stream moves its dead letters, and appends them to a log of its own; a redrive goes the same way
back. So a stream, its `NAME.dead` and the stream that a queue or a durable subscription names for dead letters are one group, which
the controller gives one place as long as it is free to choose. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from region.metadata.records import Stream, Subscription
from region.views.dead_letter import DEAD_SUFFIX


def places_together(streams: Iterable[Stream], subscriptions: Iterable[Subscription]) -> dict[str, str]:
    """The group of each stream that is not alone in its own, by name. Streams that do not exist join nothing."""
    every = {stream.name: stream for stream in streams}
    above: dict[str, str] = {}

    def first_of(name: str) -> str:
        while name in above:
            name = above[name]
        return name

    def join(one: str, other: str) -> None:
        if one in every and other in every:
            lower, upper = sorted((first_of(one), first_of(other)))
            if lower != upper:
                above[upper] = lower

    for name, stream in every.items():
        join(name, name + DEAD_SUFFIX)
        if stream.config.views.queue is not None:
            join(name, stream.config.views.queue.retries.dead_letter)
    for subscription in subscriptions:
        join(subscription.stream, subscription.settings.retries.dead_letter)
    return {name: first_of(name) for name in {*above, *above.values()}}
