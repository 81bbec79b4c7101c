"""Places the batches of committed transactions in a shard that is served here.

Invariant: a batch is appended once: its annotation is written with it, so after a crash the shard itself says what it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from felix.batch import Batch, decode_batch
from felix.errors import Code, FelixError, RequestError, UnavailableError
from region.log.message_ids import message_ids
from region.log.segment import ANNOTATION_SLOTS_MAX
from region.log.shard import Appended, ShardLog, State
from region.transactions.positions import SLOT, Placing, compare, encode_positions
from region.transactions.state import UNKNOWN_OFFSET, Part

log = logging.getLogger("felix.region.transactions")

RETRY_S: Final = 0.1
"""Between two tries of what a shard did not take now (disk full, too much pending)."""

Step = Callable[[str], None]


class StoppingError(Exception):
    """The broker stops while a committed part waits for its shard."""


def no_step(_: str) -> None: ...


def check_takes(shard: ShardLog) -> None:
    """Before the decision. Raises why a shard that has stopped, or has annotations of as many sources as it may, takes no transaction."""
    if shard.failure is not None:
        raise shard.failure.with_traceback(None)
    if SLOT not in shard.annotations and len(shard.annotations) >= ANNOTATION_SLOTS_MAX:
        raise RequestError(f"{shard.identity.stream} takes no more sources.", code=Code.UNSUPPORTED)


def release_all(shards: Iterable[ShardLog]) -> None:
    """Show what was appended, in one iteration of the event loop: nobody sees one of them without the others."""
    for shard in shards:
        shard.release_visibility()


async def place(
    shard: ShardLog,
    wanted: Sequence[Placing],
    *,
    closed: Callable[[], bool],
    step: Step = no_step,
    patience_s: float = float("inf"),
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Append what a shard does not have yet, in order, until it has it all, has stopped, or `patience_s` are over. Offsets of what it has
    then, by number and index. Raises StoppingError where it is `closed` meanwhile."""
    placed, left, positions = compare(shard.annotations.get(SLOT, b""), wanted)
    deadline = asyncio.get_running_loop().time() + patience_s
    while left:
        answers = await _append(shard, left, positions, step)
        for part, answer in answers:
            if isinstance(answer, FelixError):
                if shard.failure is not None or isinstance(answer, RequestError):
                    if shard.failure is None:
                        shard.stop(cannot_apply(part, answer))
                    log.error(
                        "%s shard %d: committed transactions wait until it is opened again: %s",
                        part.stream,
                        part.shard,
                        answer,
                    )
                    return placed
                break
            placed[part.number, part.index] = answer.offsets or (answer.base_offset,)
            positions.append((part.number, UNKNOWN_OFFSET if answer.offsets else answer.base_offset))
            left = left[1:]
        if left:
            if closed():
                # Nothing that was committed later may be appended before it: the next start goes on here.
                raise StoppingError
            if shard.state is State.STOPPED or asyncio.get_running_loop().time() > deadline:
                return placed
            await asyncio.sleep(RETRY_S)
    return placed


async def _append(
    shard: ShardLog, parts: Sequence[Part], before: Sequence[tuple[int, int]], step: Step
) -> list[tuple[Part, Appended | FelixError]]:
    """Append in one event loop iteration, as many as the shard accepts. If one is refused, so are all after it."""
    loop = asyncio.get_running_loop()
    under_way: list[tuple[Part, asyncio.Future[Appended | FelixError]]] = []
    positions = list(before)
    for part in parts:
        batch = decode_batch(part.batch)
        identified = shard.settings.deduplication is not None and message_ids(batch) is not None
        positions.append((part.number, UNKNOWN_OFFSET if identified else shard.log_end_offset))
        future: asyncio.Future[Appended | FelixError] = loop.create_future()
        shard.append_nowait(
            Batch(batch.header, bytes(batch.body)),
            _once(future),
            annotation=encode_positions(positions),
            slot=SLOT,
        )
        under_way.append((part, future))
        if future.done() and isinstance(future.result(), FelixError):
            break
        step("appended")
    return [(part, await future) for part, future in under_way]


def _once(future: asyncio.Future[Appended | FelixError]) -> Callable[[Appended | FelixError], None]:
    def done(result: Appended | FelixError) -> None:
        if not future.done():
            future.set_result(result)

    return done


def still_owed() -> UnavailableError:
    """What is answered of a transaction that is committed, while a shard of it does not serve."""
    return UnavailableError(
        "The transaction is committed, and a shard that it wrote to has stopped: its part is put there before the shard "
        "serves again.",
        code=Code.SHARD_STOPPED,
        hint="Do not publish it again. Ask again once the shard serves.",
    )


def cannot_apply(part: Part, error: Exception) -> FelixError:
    """Why a shard stops that cannot have what is committed."""
    failure = UnavailableError(
        f"Transaction {part.number} is committed and cannot be appended to {part.stream} shard {part.shard}: {error}",
        code=Code.SHARD_STOPPED,
        hint="Look at the broker's log, and start it again once the cause is gone: it is applied before the stream is served.",
    )
    failure.__cause__ = error
    return failure
