"""A broker as a process of its own, started by the real command, so that it can be killed and weighed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
from ports import claim_port
from region_home import make_region
from warm.process import WarmProcess

from cli.process import read_state
from region.folder import RegionFolder

ROOT = Path(__file__).parents[1]
START_S = 120.0


def fixed_region(home: Path, region: str = "us-east", extra: str = "") -> RegionFolder:
    """A founded region with a port that stays, and more lines for its region.yaml."""
    folder = make_region(home, region)
    text = folder.config.read_text().replace("127.0.0.1:0", f"127.0.0.1:{claim_port()}")
    folder.config.write_text(text + extra)
    profile = json.loads(folder.profile.read_text())
    profile["addresses"] = [line.split('"')[1] for line in text.splitlines() if line.startswith("listen:")]
    folder.profile.write_text(json.dumps(profile))
    return folder


class BrokerProcess:
    """`felix region up`, in the foreground of a process of its own, whose imports are done."""

    def __init__(self, folder: RegionFolder, home: Path, program: str | Path = "felix") -> None:
        """`program`: a script in place of the command, which it ends in."""
        self.folder = folder
        self.log = folder.run / "test.log"
        environment = {**os.environ, "FELIX_HOME": str(home), "PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            self.process = WarmProcess(
                program, "region", "up", folder.root.name, env=environment, cwd=ROOT, log=log
            )

    def wait(self) -> dict[str, Any]:
        """What it announced, once it serves."""
        limit = time.monotonic() + START_S
        while time.monotonic() < limit:
            state = read_state(self.folder.broker_pid)
            if state is not None and state.get("pid") == self.process.pid:
                return state
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"the broker did not come up:\n{self.said()}")

    def said(self) -> str:
        return self.log.read_text()[-4000:]

    def kill(self) -> None:
        """SIGKILL: nothing is told or flushed."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=120)

    def rss_bytes(self) -> int:
        rss: int = psutil.Process(self.process.pid).memory_info().rss
        return rss
