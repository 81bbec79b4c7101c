"""What the demos share: a region of their own, driven by the `felix` command, and a summary that must reconcile."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.table import Table

import felix
from cli.process import read_state
from region.folder import RegionFolder

REGION = "us-east"
EXIT_UNRECONCILED = 6
FELIX = [sys.executable, "-m", "cli.main"]
COMMAND_S = 120
_out = Console(highlight=False)


class OwnRegion:
    """A region with one broker in a temporary folder, for as long as the `with` block lasts."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="felix-demo-"))
        self.folder = RegionFolder.of(REGION, self.home)

    def __enter__(self) -> "OwnRegion":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            # The port stays the same across restarts, as a real broker's does.
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        try:
            self.cli("region", "init", REGION, "--mesh", "acme", "--listen", address, "--health", "none")
            self.up()
        except BaseException:
            shutil.rmtree(self.home)
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if read_state(self.folder.broker_pid) is not None:
            self.cli("region", "down", REGION)
        shutil.rmtree(self.home)

    def cli(self, *words: str) -> str:
        """Run a `felix` command in this region's home; what it printed. Raises RuntimeError where it fails."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FELIX_")}
        done = subprocess.run(
            [*FELIX, *words],
            env={**kept, "FELIX_HOME": str(self.home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"felix {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def up(self) -> None:
        """Start the broker."""
        self.cli("region", "up", REGION, "--detach")

    @property
    def pid(self) -> int:
        """The broker's process."""
        state = read_state(self.folder.broker_pid)
        assert state is not None, "the broker runs"
        return int(state["pid"])

    def kill(self) -> None:
        """SIGKILL: the broker flushes nothing and tells nobody."""
        os.kill(self.pid, signal.SIGKILL)
        while read_state(self.folder.broker_pid) is not None:
            time.sleep(0.01)

    def memory_bytes(self) -> int:
        """What the broker's process has in memory now."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        return int(found[1]) * 1024 if found else 0

    def connect(self, identity: str = "") -> felix.RegionClient:
        """A client of the region, as its operator or as an identity that was issued. Use it as `async with`."""
        return felix.connect(profile=felix.load_profile(REGION, home=self.home, identity=identity))


class Summary:
    """Figures, and what each must be."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._rows: list[tuple[str, object, object]] = []

    def figure(self, what: str, found: object) -> None:
        """A figure to know."""
        self._rows.append((what, found, None))

    def must(self, what: str, found: object, wanted: object) -> None:
        """A figure that must be this one."""
        self._rows.append((what, found, wanted))

    def end(self) -> int:
        """Print everything; the exit code: 0 where all reconciles."""
        table = Table(title=self._title, title_justify="left", header_style="bold", pad_edge=False)
        table.add_column("")
        table.add_column("found", justify="right")
        table.add_column("must be", justify="right")
        table.add_column("")
        wrong = 0
        for what, found, wanted in self._rows:
            agrees = wanted is None or found == wanted
            wrong += not agrees
            mark = "" if wanted is None else "[green]✓[/]" if agrees else "[bold red]✗[/]"
            table.add_row(what, _text(found), "" if wanted is None else _text(wanted), mark)
        _out.print(table)
        if wrong:
            _out.print(f"[bold red]{wrong} figures do not reconcile.[/]")
        else:
            _out.print("Every figure reconciles.")
        return EXIT_UNRECONCILED if wrong else 0


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def say(text: str) -> None:
    """One line of what is going on."""
    _out.print(f"[dim]·[/] {text}")
