"""One broker and its clients over the real QUIC engines: everything of `felix.transport` runs as it is, over sockets in memory (transport.wire).

What `simulation.region_world` plays over a network of streams is played here over datagrams: lost, late, twice, damaged, refused by the kernel.
"""

from __future__ import annotations

import asyncio
from functools import cache
from random import Random
from typing import Any, ClassVar, Final

from simulation.clients import Balances, Invoices, Orders
from simulation.region_world import SERVER_NAME, RegionWorld
from simulation.script import Script, Step
from simulation.world import InvariantError
from transport.certificates import Authority
from transport.wire import CALM, WireEngine, WireHosts, WireLoop, draw_faults, on_simulated_time

import felix
from felix.errors import Code, FelixError, UnavailableError
from felix.runtime.simulated import SimulatedLoop
from felix.transport.driver import DriverEngine
from felix.transport.port import ENGINE_NAMES, Engine, ServerTls, engine_named

FAULT_S_MAX: Final = 8.0
"""Of one fault here: long enough that connections are given up and made again, and far less than a publisher tries."""


class PromptOrders(Orders):
    """Faults are short here: whoever sends a batch is answered within the time that a publisher tries."""

    async def _publish(self, stream: felix.Stream, number: int) -> None:
        try:
            offset = await stream.publish(b"%d" % number)
        except UnavailableError as error:
            if error.code is Code.TIMEOUT:
                raise InvariantError(f"record {number}: {error.sentence}") from error
            await super()._publish(stream, number)
            return
        except FelixError:
            await super()._publish(stream, number)
            return
        self.world.note(f"published {number}: {offset}")
        if number < self.records:
            self.acknowledged[number] = offset
            self.world.count("acknowledged")


@cache
def _certified() -> tuple[bytes, ServerTls]:
    """Certificates of the machine's own time, which is what TLS goes by."""
    authority = Authority.make(kind="ed25519")
    return authority.pem, authority.server(SERVER_NAME, kind="ed25519")


class WireRegionWorld(RegionWorld):
    """See the module. A seed draws the engine of each host."""

    faults: ClassVar[tuple[str, ...]] = ("kill", "part", "deaf", *("wire", "pause") * 4)
    kinds = (PromptOrders, Invoices, Balances)
    """Without a durable cursor: what a consumer was sent that then stood still for longer than its time to acknowledge comes again, though it acknowledges as it goes on."""
    bad_disks = 0.0
    engines: ClassVar[tuple[str, ...]] = ENGINE_NAMES

    def __init__(self, seed: int, loop: SimulatedLoop, script: Script) -> None:
        super().__init__(seed, loop, script)
        assert isinstance(loop, WireLoop)
        random = Random(f"wire {seed}")
        self._drawn = random
        loop.iteration_s = random.choice((5e-6, 20e-6, 200e-6))
        self.hosts_on_wire = WireHosts(loop.network, is_local=random.random() < 0.7)
        self.network: Any = self.hosts_on_wire
        self._engine_of = {host: random.choice(self.engines) for host in ("broker", "client")}

    @classmethod
    def make_loop(cls, random: Random) -> SimulatedLoop:
        return WireLoop(random)

    def engine(self, host: str) -> Engine:
        pem, tls = _certified()
        engine = engine_named(self._engine_of[host])
        assert isinstance(engine, DriverEngine)
        return WireEngine(self.hosts_on_wire, host, engine.machinery, tls, pem)

    async def run(self) -> None:
        assert isinstance(self.loop, WireLoop)
        with on_simulated_time(self.loop):
            await super().run()

    async def fault(self, step: Step) -> None:
        step = step._replace(lasts_s=min(step.lasts_s, FAULT_S_MAX))
        if step.what == "pause":
            assert isinstance(self.loop, WireLoop)
            process = "clients" if step.number & 1 else self.hosts[step.where].process
            self.loop.pause(process, step.lasts_s * (1 if step.number & 2 else 8))
            self.count("pauses")
            return
        if step.what != "wire":
            await super().fault(step)
            return
        self.hosts_on_wire.between = draw_faults(self._drawn)
        await asyncio.sleep(min(step.lasts_s, 3.0))
        self.hosts_on_wire.between = CALM
