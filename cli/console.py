"""`felix console`: a page that shows the mesh as it is now, served to this machine alone under an identity that may observe."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Annotated, Final

import typer

from cli.clash import told
from cli.console_server import HOST, ConsoleServer, Page
from cli.console_view import encode_view, view_of
from cli.mesh_map import Survey, survey
from cli.output import err, note
from cli.setting import IdentityOption, choose_region, connect, known_regions, run, stop_signals
from felix.errors import AddressInUseError, Code, FelixError, RequestError
from felix.runtime.real import now_ms

INTERVAL_S: Final = 2.0
"""Between two looks at a region, while somebody looks on."""
ANSWER_S: Final = 10.0
"""A region that has not answered by then is shown as down, until it does."""


def console(
    region: Annotated[
        list[str] | None, typer.Option("--region", "-r", help="Show this region alone; may be repeated.")
    ] = None,
    identity: IdentityOption = "",
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes any.", min=0, max=65_535)] = 0,
) -> None:
    """Serve a page with the mesh as it is now, on 127.0.0.1, until interrupted. It shows and changes nothing."""
    regions = [choose_region(name) for name in region] if region else known_regions() or [choose_region()]
    with told("name another port with --port, or none."):
        run(_serve(regions, identity, port))


async def _serve(regions: Sequence[str], identity: str, port: int) -> None:
    ended = stop_signals()
    await _require_one(regions, identity)
    page = Page.of((files("cli") / "console.html").read_text(encoding="utf-8"))

    def show_link(says: str) -> None:
        note(says)
        err.print(server.url, soft_wrap=True)  # a link that is broken into lines cannot be opened

    server = ConsoleServer(page, lambda: show_link("Opened. For another viewer:"))
    try:
        await server.start(port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"{HOST}:{port}", "TCP") from error
        raise RequestError(
            f"{HOST}:{port} cannot be used: {error.strerror or error}.",
            code=Code.CONFIG_INVALID,
            hint="Name another port with --port, or none.",
        ) from error
    show_link(f"The console shows {', '.join(regions)}; end it with Ctrl-C. This link opens it, once:")
    watch = Watch(server, regions, identity)
    working = [asyncio.ensure_future(watch.look(name)) for name in regions]
    working.append(asyncio.ensure_future(watch.tell()))
    stopped = asyncio.ensure_future(ended.wait())
    try:
        done, _ = await asyncio.wait([*working, stopped], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (*working, stopped):
            task.cancel()
        await asyncio.gather(*working, stopped, return_exceptions=True)
        await server.close()


async def _require_one(regions: Sequence[str], identity: str) -> None:
    """Raises what the first region refuses with, where none answers: a page that could never show anything is not served."""
    first: FelixError | None = None
    for name in regions:
        try:
            async with connect(name, identity) as client:
                await client.describe()
                return
        except FelixError as error:
            first = first or error
    assert first is not None
    raise first


class Watch:
    """Looks at each region while somebody looks at the page, and tells the server of all of them together."""

    def __init__(self, server: ConsoleServer, regions: Sequence[str], identity: str) -> None:
        self._server, self._identity = server, identity
        self._now = {name: Survey(name, "It has not been asked yet.") for name in regions}
        self._before = dict(self._now)
        self._answered = asyncio.Event()
        """set once some region has"""

    async def look(self, region: str) -> None:
        """Ask one region again and again; what keeps it from answering is its problem, and it is asked again."""
        while True:
            await self._server.watched.wait()
            try:
                async with connect(region, self._identity) as client:
                    while True:
                        async with asyncio.timeout(ANSWER_S):
                            found = await survey(client, region)
                        self._before[region], self._now[region] = self._now[region], found
                        self._answered.set()
                        await asyncio.sleep(INTERVAL_S)
                        await self._server.watched.wait()
            except FelixError as error:
                self._now[region] = Survey(region, error.sentence)
            except TimeoutError:
                self._now[region] = Survey(region, f"It has not answered for {ANSWER_S:.0f} s.")
            await asyncio.sleep(INTERVAL_S)

    async def tell(self) -> None:
        """Publish what is known, as often as regions are asked; the first time as soon as one has answered."""
        while True:
            await self._server.watched.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S):
                    await self._answered.wait()
            surveys = list(self._now.values())
            self._server.publish(encode_view(view_of(self._before.values(), surveys, now_ms())))
            await asyncio.sleep(INTERVAL_S)
