"""A region of several brokers as processes: its configuration, with ports of a test's own, and the processes by broker."""

from __future__ import annotations

from pathlib import Path

from ports import claim_port
from region_home import make_region

from cli.process import read_state
from cli.several import ETCD_FOLDER, pid_file
from felix.address import Address
from region.bootstrap import write_profile
from region.folder import RegionFolder


def several(home: Path, count: int, *, lease: str = "") -> RegionFolder:
    """A region whose brokers and etcd have ports of this test's own."""
    folder = make_region(home, "us-east")
    text = folder.config.read_text().replace(
        "kind: embedded", f'kind: etcd\n  endpoints: ["127.0.0.1:{claim_port()}"]'
    )
    ports = [claim_port() for _ in range(count)]
    text += "cluster:\n" + (f"  lease: {lease}\n" if lease else "") + "  brokers:\n"
    text += "".join(
        f'    - {{id: b{number + 1}, listen: "127.0.0.1:{port}"}}\n' for number, port in enumerate(ports)
    )
    folder.config.write_text(text)
    (folder.root / ETCD_FOLDER).mkdir()
    write_profile(folder, "us-east", "acme", *(Address("127.0.0.1", port) for port in ports))
    return folder


def process_of(folder: RegionFolder, broker: str) -> int:
    """The process id of a broker; 0 while it does not run."""
    state = read_state(pid_file(folder, broker))
    return 0 if state is None else int(state["pid"])
