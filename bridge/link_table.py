"""The links of an agent: a worker for each that was to run, and what is said of those that never were.

A pattern's streams may have thousands of shards, of which an agent runs sixty. So nothing is held for a link that does not run but its row, nobody is told what did not change, and
what takes a while is done a part at a time, with the loop's other work in between. On the event loop. Caller: bridge.agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from bridge.endpoint import RegionEndpoint
from bridge.link import LinkPhase
from bridge.link_context import LinkContext, LinkStats
from bridge.link_worker import LinkWorker, may_run, state_at_rest
from bridge.plan import STEP_ROWS, Place, Plan, PlannedLink, Verdict
from felix.messages import LinkState, StreamState

REPORTED_MAX: Final = 10_000
"""Links that are reported: as many as a region shows of one agent, and those that were to run before those that never were."""
RESTING_S: Final = 10.0
"""How often is said again what did not change of links that never were to run."""

Key = tuple[str, str, int]
"""grant, stream, shard"""


class LinkTable:
    """`tell` it each plan. Invariant: of one link there is one worker at a time."""

    def __init__(self, context: LinkContext, endpoints: Mapping[str, RegionEndpoint]) -> None:
        self._context, self._endpoints = context, endpoints
        self._told: dict[Place, tuple[PlannedLink, ...]] = {}
        self._unsettled: set[Place] = set()
        """where a worker has to end before the next one begins"""
        self._workers: dict[Key, tuple[LinkWorker, asyncio.Task[None]]] = {}
        self._leaving: set[Key] = set()
        self._streams: Mapping[str, StreamState] = {}
        self._reported: dict[Place, tuple[PlannedLink, ...]] = {}
        """links that never were to run, as the region was told last"""
        self._reported_s = 0.0

    @property
    def workers(self) -> list[LinkWorker]:
        return [worker for worker, _ in list(self._workers.values())]

    @property
    def running(self) -> list[asyncio.Task[None]]:
        return [task for _, task in self._workers.values()]

    def clear(self) -> None:
        """Forget them all; their tasks have ended."""
        self._workers.clear()
        self._leaving.clear()
        self._told.clear()

    def find(self, grant: str, stream: str, shard: int) -> LinkStats | None:
        """What a link counts; None where none is planned."""
        held = self._workers.get((grant, stream, shard))
        if held is not None:
            return held[0].stats
        planned = any(row.shard == shard for row in self._told.get((grant, stream), ()))
        return LinkStats() if planned else None

    # -- the plan --------------------------------------------------------------------------------------

    async def tell(self, plan: Plan, streams: Mapping[str, StreamState]) -> None:
        """Begin, change and end what the plan does. `streams`: by name, as the source described them."""
        self._streams = streams
        for key in [key for key in self._leaving if self._workers[key][1].done()]:
            self._leaving.remove(key)
            del self._workers[key]
        for place in [place for place in self._told if place not in plan]:
            # Its stream or its grant is not there any more.
            self._leave(self._told.pop(place))
            self._unsettled.discard(place)
            self._reported.pop(place, None)
        done = 0
        for place, rows in plan.items():
            before = self._told.get(place)
            if before is not rows or place in self._unsettled:
                self._take(place, rows, before or ())
                done += len(rows)
            if done >= STEP_ROWS:
                done = 0
                await asyncio.sleep(0)
        for (grant, stream, shard), (worker, _) in self._workers.items():
            # It may have been told something besides the plan.
            rows = plan.get((grant, stream), ())
            row = rows[shard] if shard < len(rows) else None
            if row is not None and row.shard == shard and worker.row is not row and not worker.is_leaving:
                worker.take_plan(row)
            self._hear(worker, streams.get(stream), shard)

    def _take(self, place: Place, rows: tuple[PlannedLink, ...], before: tuple[PlannedLink, ...]) -> None:
        if before and before is not rows:
            known = {_key(row) for row in rows}
            self._leave(tuple(row for row in before if _key(row) not in known))
        self._told[place] = rows
        self._unsettled.discard(place)
        for row in rows:
            key = _key(row)
            held = self._workers.get(key)
            if held is None and may_run(row):
                worker = LinkWorker(self._context, self._endpoints.get(row.destination_region), row)
                task = asyncio.get_running_loop().create_task(worker.run(), name=f"link-{key[0]}-{key[2]}")
                self._workers[key] = worker, task
            elif held is not None and held[0].is_leaving:
                # Back again while it ends: a new one takes over in the next round.
                self._unsettled.add(place)

    def _leave(self, rows: tuple[PlannedLink, ...]) -> None:
        for row in rows:
            held = self._workers.get(_key(row))
            if held is not None:
                held[0].leave()
                self._leaving.add(_key(row))

    def hold_back(self, judge: Callable[[PlannedLink], PlannedLink | None]) -> None:
        """Links that ran and are not to run any more hear of it before the next plan. `judge`: the row as it is now, of one that does not run any more."""
        for worker in self.workers:
            if worker.row.verdict is Verdict.RUN and (row := judge(worker.row)) is not None:
                worker.take_plan(row)

    def hear(self, state: StreamState) -> None:
        """What the source says of a stream's shards."""
        for (_, stream, shard), (worker, _) in self._workers.items():
            if stream == state.stream:
                self._hear(worker, state, shard)

    def _hear(self, worker: LinkWorker, state: StreamState | None, shard: int) -> None:
        if state is not None and 0 <= shard < len(state.state):
            worker.take_shard(state, state.state[shard])

    def followed_streams(self) -> set[str]:
        """Those of which links run, or ran and may go on: how far they go is asked also while a grant is paused or denied."""
        return {worker.row.stream for worker in self.workers if worker.row.verdict is not Verdict.STOP}

    # -- what is said ----------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int]:
        """Links that are active, and all."""
        active = sum(worker.phase is LinkPhase.ACTIVE for worker in self.workers)
        return active, sum(map(len, list(self._told.values())))

    def stands_still(self) -> str:
        """A link that stands still until somebody decides, and why; empty where none does. Also called on another thread."""
        for worker in self.workers:
            if worker.phase in (LinkPhase.DENIED, LinkPhase.GAP, LinkPhase.TRUNCATED):
                return f"{worker.row.grant}: {worker.reason}"
        for rows in list(self._told.values()):
            # One that was denied before it ever ran; a stream's shards all are.
            if rows and rows[0].verdict is Verdict.DENY:
                return f"{rows[0].grant}: {rows[0].reason}"
        return ""

    def states(self) -> list[tuple[LinkState, LinkStats]]:
        """Every link as it stands, by grant, stream and shard. Also called on another thread."""
        notice, workers = self._context.notice(), dict(self._workers)
        found = {key: (worker.report(notice), worker.stats) for key, (worker, _) in workers.items()}
        for rows in list(self._told.values()):
            for row in rows:
                if _key(row) not in found:
                    found[_key(row)] = self._at_rest(row, notice), LinkStats()
        return [found[key] for key in sorted(found)]

    def reports(self, *, anew: bool) -> Iterator[LinkState]:
        """What the region is to be told now: all links that were to run, and of the others what changed, or RESTING_S later all. `anew`: the region may have forgotten what it was told."""
        notice, now_s, told = self._context.notice(), self._context.runtime.clock.monotonic(), 0
        for _, (worker, _) in sorted(self._workers.items(), key=lambda each: each[0])[:REPORTED_MAX]:
            told += 1
            yield worker.report(notice)
        if anew or now_s - self._reported_s >= RESTING_S:
            self._reported.clear()
            self._reported_s = now_s
        for place, rows in list(self._told.items()):
            if self._reported.get(place) is rows:
                continue
            for row in rows:
                if _key(row) not in self._workers:
                    told += 1
                    if told > REPORTED_MAX:
                        return
                    yield self._at_rest(row, notice)
            self._reported[place] = rows

    def _at_rest(self, row: PlannedLink, notice: str) -> LinkState:
        stream = self._streams.get(row.stream)
        known = stream is not None and 0 <= row.shard < len(stream.state)
        high = stream.state[row.shard].high_watermark if stream is not None and known else -1
        return state_at_rest(self._context, row, high, notice)


def _key(row: PlannedLink) -> Key:
    return row.grant, row.stream, row.shard
