"""What the demo waits for before it verifies."""

from __future__ import annotations

from pathlib import Path
from threading import Timer

import pytest

from audit.tile import CHECKPOINT_PATH, COSIGNED_PATH
from cli import demo


def note(size: int) -> bytes:
    return b"us-east.acme/audit\n%d\nroot\n\n" % size


@pytest.mark.parametrize("comes", [True, False], ids=["cosigned", "not in time"])
def test_the_demo_waits_until_the_last_leaf_of_every_log_is_cosigned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    (tmp_path / CHECKPOINT_PATH).write_bytes(note(6))
    (tmp_path / COSIGNED_PATH).write_bytes(note(5))
    monkeypatch.setattr(demo, "_logs", lambda home: {"source": tmp_path})
    monkeypatch.setattr(demo, "COSIGNED_S", 20.0 if comes else 0.5)
    monkeypatch.setattr(demo, "STILL_S", 0.2)
    arrives = Timer(0.5, (tmp_path / COSIGNED_PATH).write_bytes, [note(6)])
    if comes:
        arrives.start()
    demo._await_cosignatures(tmp_path)
    assert (tmp_path / COSIGNED_PATH).read_bytes() == note(6 if comes else 5)
    arrives.cancel()
