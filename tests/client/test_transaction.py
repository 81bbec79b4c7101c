"""What one task publishes or acknowledges while another one commits is part of the transaction, or refused."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from felix.batch import decode_batch, decode_records
from felix.consumer import ConsumerRecord
from felix.errors import RequestError
from felix.transaction import STAGE_BYTES, Transaction
from felix.transaction_messages import (
    Abort,
    Begin,
    Begun,
    Commit,
    Committed,
    Resolve,
    Resolved,
    Stage,
    StageAcknowledgement,
)

ORDERS = "acme/shop/orders"


class Slow:
    """A broker that stages nothing while `goes_on` is clear; of the calls, it keeps those that count."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.staged: list[Stage | StageAcknowledgement] = []
        self.committed: int | None = None

    def new_id(self) -> bytes:
        return bytes(16)

    async def call(self, message: Any) -> Any:
        await asyncio.sleep(0)
        match message:
            case Begin():
                return Begun(1)
            case Resolve():
                return Resolved(2, bytes(16))
            case Stage() | StageAcknowledgement():
                await self.goes_on.wait()
                assert self.committed is None and message.index == len(self.staged)
                self.staged.append(message)
            case Commit():
                self.committed = message.staged
                await asyncio.sleep(0.01)
                return Committed([[n] for n, part in enumerate(self.staged) if isinstance(part, Stage)])
            case Abort():
                pass


async def begun() -> tuple[Slow, Transaction]:
    broker = Slow()
    transaction = Transaction(broker, timeout_s=60, transactional_id="", compress=0)  # type: ignore[arg-type]
    await transaction.begin()
    return broker, transaction


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


LARGE = bytes(STAGE_BYTES - 1_000)


@pytest.mark.parametrize("shard", [0, 1])
async def test_what_is_published_while_another_task_commits_is_committed_with_it(shard: int) -> None:
    broker, transaction = await begun()
    for each in (0, 1):
        await transaction.publish(ORDERS, LARGE, shard=each)
    commit = asyncio.ensure_future(transaction.commit())
    await settled()
    publish = asyncio.ensure_future(transaction.publish(ORDERS, LARGE, shard=shard))
    await settled()
    broker.goes_on.set()
    async with asyncio.timeout(60):
        offsets = await commit
        assert (await publish).offset in offsets and len(offsets) == 3
    assert broker.committed == len(broker.staged) == 3


@pytest.mark.parametrize(("tasks", "size"), [(6, 600_000), (4, 1_000_000), (9, 200_000)])
async def test_what_many_tasks_publish_at_once_is_staged_in_batches_that_fit(tasks: int, size: int) -> None:
    broker, transaction = await begun()
    publishing = [
        asyncio.ensure_future(transaction.publish(ORDERS, bytes([n]) * size, shard=0)) for n in range(tasks)
    ]
    await settled()
    broker.goes_on.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*publishing)
        with suppress(IndexError):  # this broker knows no offsets of a batch's later records
            await transaction.commit()
    staged = [
        bytes(record.payload)
        for part in broker.staged
        if isinstance(part, Stage)
        for record in decode_records(decode_batch(part.batch))
    ]
    assert sorted(staged) == [bytes([n]) * size for n in range(tasks)]


async def test_what_cannot_be_staged_keeps_the_rest_from_being_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker, transaction = await begun()
    broker.goes_on.set()
    await transaction.publish(ORDERS, b"one", shard=0)

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise RequestError("It cannot be encoded.")

    monkeypatch.setattr("felix.transaction.encode_batch", refuse)
    for _ in range(2):
        with pytest.raises(RequestError, match="cannot be encoded"):
            await transaction.commit()
    assert broker.committed is None


async def test_what_is_acknowledged_while_another_task_commits_is_committed_with_it() -> None:
    broker, transaction = await begun()
    consumer: Any = SimpleNamespace(stream=ORDERS, name="crew")
    first, second = (
        ConsumerRecord(offset, 0, None, {}, b"", shard=0, attempt=1, generation=1) for offset in (0, 1)
    )
    await transaction.acknowledge(first, consumer=consumer)
    commit = asyncio.ensure_future(transaction.commit())
    await settled()
    await transaction.acknowledge(second, consumer=consumer)
    broker.goes_on.set()
    async with asyncio.timeout(60):
        await commit
    assert broker.committed == len(broker.staged) == 2


@pytest.mark.parametrize("how", ["publish", "commit"])
async def test_who_stages_while_another_task_aborts_is_told_so(how: str) -> None:
    broker, transaction = await begun()
    await transaction.publish(ORDERS, LARGE, shard=0)
    more = transaction.publish(ORDERS, LARGE, shard=0) if how == "publish" else transaction.commit()
    staging = asyncio.ensure_future(more)
    await settled()
    await transaction.abort()
    broker.goes_on.set()
    with pytest.raises(RequestError, match="not open"):
        await staging
    assert broker.committed is None
