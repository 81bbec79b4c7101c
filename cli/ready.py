"""Whether a process on this machine serves, as its own health page says: for health checks of containers, and for scripts."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Final

from cli.output import out
from cli.process import read_state
from felix.address import Address
from felix.errors import UnavailableError

TIMEOUT_S: Final = 5.0
"""A page that reads numbers answers at once, or the process hangs."""


def check_ready(pid_file: Path, what: str, *, in_sync: bool = False) -> None:
    """Print that it serves; with `in_sync`, that it has all that it should, too. Raises UnavailableError with the reason where it does not, or has no health page to
    say so. Blocks."""
    state = read_state(pid_file)
    if state is None:
        raise UnavailableError(
            f"{what} does not run, or does not serve yet.",
            hint=f"Start it. If it was started, its log says why: {pid_file.with_suffix('.log')}",
        )
    health = str(state.get("health") or "")
    if health:
        _ask(Address.parse(health), what, "/syncz" if in_sync else "/readyz")
    elif in_sync:
        raise UnavailableError(
            f"{what} has no health page to ask.",
            hint="Set health: in region.yaml, or see felix region status.",
        )
    # Without a health page it has announced itself and lives, and that is all there is to know.
    out.print(f"{what} serves{' and is in sync' if in_sync else ''}.")


def _ask(address: Address, what: str, path: str) -> None:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        reason = str(json.loads(answer.read()).get("reason", ""))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UnavailableError(
            f"{what} does not answer at {address}: {error or type(error).__name__}."
        ) from error
    finally:
        connection.close()
    if answer.status != http.client.OK:
        lacks = "does not serve, or not all that it should" if path == "/syncz" else "does not serve"
        raise UnavailableError(f"{what} {lacks}: {reason}.".replace("..", "."))
