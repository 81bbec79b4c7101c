"""What this machine's regions have cosigned of a log is asked of each of them, whatever is wrong with another one's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from region_home import make_region

from audit.witness import DiskWitnessStore
from cli.audit import remembered_here


def test_a_region_whose_configuration_is_broken_keeps_no_other_from_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    broken, whole = make_region(tmp_path, "ap-south"), make_region(tmp_path, "us-east")
    note = b"eu-west.acme\n7\nAAAA\n\n"
    monkeypatch.setattr(DiskWitnessStore, "notes", lambda self: iter([note]))
    (whole.root / "data" / "witness").mkdir(parents=True)
    broken.config.write_text("region: [")
    assert remembered_here() == [note]
    assert "Not all that ap-south has cosigned is asked" in capsys.readouterr().err


def test_nor_does_one_note_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    note = b"eu-west.acme\n7\nAAAA\n\n"
    for region, origins in (("ap-south", "abc"), ("us-east", "d")):
        store = DiskWitnessStore(make_region(tmp_path, region).root / "data" / "witness")
        for origin in origins:
            store.swap(origin, None, note)
    broken = min((tmp_path / "ap-south" / "data" / "witness").glob("*.checkpoint"))
    broken.unlink()
    broken.mkdir()
    assert remembered_here() == [note] * 3
    assert "Not all that ap-south has cosigned is asked" in capsys.readouterr().err
