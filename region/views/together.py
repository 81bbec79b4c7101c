"""Which streams are to be placed together: those that dead letters go between.

Of several brokers the one that leads a stream moves its dead letters, and appends them to a log of its own; a redrive goes the same way
back. So the controller gives them one place: first a stream and its `NAME.dead`, then these and the stream that a queue or a durable
subscription names for dead letters, as far as those do not stand at different places already. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from felix.settings import DEAD_SUFFIX
from region.metadata.records import Stream, Subscription


def places_together(
    streams: Iterable[Stream], subscriptions: Iterable[Subscription]
) -> dict[str, tuple[str, str]]:
    """By name, the groups (placement.Wish) of each stream that is not alone in both. Streams that do not exist join nothing."""
    every = {stream.name: stream for stream in streams}
    own, named = _Groups(), _Groups()
    for name, stream in every.items():
        if name + DEAD_SUFFIX in every:
            own.join(name, name + DEAD_SUFFIX)
            named.join(name, name + DEAD_SUFFIX)
        queue = stream.config.views.queue
        if queue is not None and queue.retries.dead_letter in every:
            named.join(name, queue.retries.dead_letter)
    for subscription in subscriptions:
        target = subscription.settings.retries.dead_letter
        if subscription.stream in every and target in every:
            named.join(subscription.stream, target)
    return {name: (own.of(name), named.of(name)) for name in named.members}


class _Groups:
    """Names that belong together, however they were joined."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    @property
    def members(self) -> set[str]:
        return {*self._above, *self._above.values()}

    def of(self, name: str) -> str:
        while name in self._above:
            name = self._above[name]
        return name

    def join(self, one: str, other: str) -> None:
        lower, upper = sorted((self.of(one), self.of(other)))
        if lower != upper:
            self._above[upper] = lower
