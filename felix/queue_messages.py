"""Messages of a queue's exchange: the bodies of CALL and REPLY frames after OpenQueue (felix.messages).

Jobs go out in REPLY frames, as the answer to a lease or as an event under a grant. Which jobs a worker means it says in runs
(`Held`): shard, first offset, how many, and the token of their leases. Times in ms, sizes in bytes. Pure.
"""

from typing import Annotated, Any, Final

import msgspec

from felix.batch import RECORDS_MAX
from felix.errors import Code, ProtocolError
from felix.messages import Message, Name, Natural

LEASE_RECORDS_MAX: Final = 4_096
"""Jobs of one lease; a worker that wants more at a time uses a grant."""
LEASE_BYTES_MAX: Final = 1 << 20
"""Of the jobs in one frame."""
RUNS_MAX: Final = 4_096
"""Runs in one call."""
REASON_CHARS_MAX: Final = 1_000

Count = Annotated[int, msgspec.Meta(ge=1, le=LEASE_RECORDS_MAX)]
Shard = Annotated[int, msgspec.Meta(ge=0, le=255)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]


class Held(msgspec.Struct, frozen=True, array_like=True):
    """Jobs in a row: `records` of them in `shard`, from `first` on, each leased under `token`."""

    shard: Shard
    first: Natural
    records: Annotated[int, msgspec.Meta(ge=1, le=RECORDS_MAX)]
    token: Natural


Runs = Annotated[list[Held], msgspec.Meta(min_length=1, max_length=RUNS_MAX)]


class Job(msgspec.Struct, frozen=True, array_like=True):
    """One record that is leased: where it stands, the lease's token, how often it was delivered (this time counted), the broker's
    time of its publication."""

    shard: int
    offset: int
    token: int
    attempts: int
    timestamp_ms: int
    payload: bytes
    key: bytes | None = None
    headers: dict[str, bytes] = {}


class NewJob(msgspec.Struct, frozen=True, array_like=True):
    """One record to be put."""

    payload: bytes
    key: bytes | None = None
    headers: dict[str, bytes] = {}


# -- calls ---------------------------------------------------------------------------------------------


class Put(Message, frozen=True, tag="put"):
    """Append records, as one batch, to the shard of the first one's key, or to `shard`. With `producer` (not 0), `epoch` and
    `sequence` a repeat is recognised, as on a publish stream."""

    records: Annotated[list[NewJob], msgspec.Meta(min_length=1, max_length=LEASE_RECORDS_MAX)]
    shard: Annotated[int, msgspec.Meta(ge=-1, le=255)] = -1
    producer: Natural = 0
    epoch: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)] = 0
    sequence: Natural = 0


class Lease(Message, frozen=True, tag="lease"):
    """Up to `records` jobs of together `bytes`, at least one if there is one; waits `wait_ms` for the first. `visibility_ms` 0:
    as the queue says."""

    records: Count = 1
    bytes: Natural = LEASE_BYTES_MAX
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=600_000)] = 0
    visibility_ms: Natural = 0


class Grant(Message, frozen=True, tag="grant"):
    """Push jobs as they become ready: at most `records` of them and `bytes` in all since the exchange was opened. With `records` 0
    the push ends: no job follows the reply."""

    records: Natural
    bytes: Natural
    visibility_ms: Natural = 0


class Ack(Message, frozen=True, tag="ack"):
    jobs: Runs


class Nack(Message, frozen=True, tag="nack"):
    """Give jobs back for after `delay_ms`; -1: what the queue's retries say."""

    jobs: Runs
    delay_ms: Annotated[int, msgspec.Meta(ge=-1, le=366 * 24 * 3_600_000)] = -1
    reason: Reason = ""


class Release(Message, frozen=True, tag="release"):
    """Give jobs back that were not looked at: at once, and not counted as an attempt."""

    jobs: Runs


class Extend(Message, frozen=True, tag="extend"):
    """The leases go on for `visibility_ms` from now; 0: as the queue says."""

    jobs: Runs
    visibility_ms: Natural = 0


class Describe(Message, frozen=True, tag="describe_queue"):
    pass


class Peek(Message, frozen=True, tag="peek"):
    """The first records that are not done, without leasing them."""

    records: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 10


class Redrive(Message, frozen=True, tag="redrive"):
    """Bring dead letters back, oldest first: up to `records` of them, 0: all there are now."""

    records: Natural = 0


class Purge(Message, frozen=True, tag="purge"):
    """Everything that is in the queue now is done."""


Call = Put | Lease | Grant | Ack | Nack | Release | Extend | Describe | Peek | Redrive | Purge

# -- replies -------------------------------------------------------------------------------------------


class Stored(Message, frozen=True, tag="stored"):
    shard: int
    base_offset: int


class Jobs(Message, frozen=True, tag="jobs"):
    """Leased until `until_ms`, which is `visibility_ms` from when the broker leased them."""

    jobs: list[Job]
    visibility_ms: int = 0
    until_ms: int = 0


class Settled(Message, frozen=True, tag="settled"):
    """The operation is done and durable, except for the jobs in `lost`: their leases are lost (shard and offset)."""

    lost: list[tuple[int, int]] = msgspec.field(default_factory=list)


class Worker(Message, frozen=True, tag="worker"):
    """A worker: its identity, how many jobs it holds, and its name for people."""

    identity: Name
    leased: int
    granted: bool = False
    name: Name = ""


class QueueState(Message, frozen=True, tag="queue"):
    """`ready` counts what has not been read ahead yet; `waiting` stands behind a record of the same key. Rates in records per
    second over the last ten; `acked`, `redelivered` and `dead_lettered` since the broker opened the queue."""

    queue: Name
    ready: int
    leased: int
    delayed: int
    waiting: int
    dead: int
    oldest_ms: int
    in_rate: float
    out_rate: float
    acked: int
    redelivered: int
    dead_lettered: int
    dead_letter: Name
    workers: list[Worker] = msgspec.field(default_factory=list)


class PeekedJob(msgspec.Struct, frozen=True, array_like=True):
    """A record that is not done, and what it is: ready, waiting, delayed, leased or moving; `due_ms` is until when.

    Of a leased one: since when this lease lasts, however often it was extended, and who has it, by identity and name. Since when is 0, and
    who is empty, where the broker does not know it, as of leases from before its start; who is empty where the worker has left."""

    job: Job
    phase: str
    due_ms: int
    leased_ms: int = 0
    identity: Name = ""
    worker: Name = ""


class Peeked(Message, frozen=True, tag="peeked"):
    jobs: list[PeekedJob]


class Counted(Message, frozen=True, tag="counted"):
    """How many records it was."""

    records: int


Reply = Stored | Jobs | Settled | QueueState | Peeked | Counted

_call_decoder: Final = msgspec.msgpack.Decoder(Call)
_reply_decoder: Final = msgspec.msgpack.Decoder(Reply)


def decode_call(body: memoryview) -> Call:
    """Raises ProtocolError(FRAME_MALFORMED)."""
    call: Call = _decode(_call_decoder, body, "call")
    return call


def decode_reply(body: memoryview) -> Reply:
    """Raises ProtocolError(FRAME_MALFORMED)."""
    reply: Reply = _decode(_reply_decoder, body, "reply")
    return reply


def _decode(decoder: Any, body: memoryview, what: str) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"A malformed {what} of a queue: {error}.", code=Code.FRAME_MALFORMED) from error
