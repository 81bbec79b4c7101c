"""What `region status` and `doctor` say of certificates that near their end, from the files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from region_home import make_region
from typer.testing import CliRunner

from cli.doctor import _region
from cli.expiry import expiring
from cli.main import app
from felix.messages import ExpiryState
from felix.runtime.real import now_ms
from region.bootstrap import issue_identity
from region.config import load_config
from region.folder import RegionFolder

DAY = 86_400_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RegionFolder:
    """A region whose issuing certificate has 35 days left."""
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    monkeypatch.setattr("region_home.now_ms", lambda: now_ms() - 330 * DAY)
    folder = make_region(tmp_path, "us-east")
    config = load_config(folder.config)
    for name, kind, age in (
        ("operator", "operator", 31),
        ("orders", "client", 28),
        ("fresh", "client", 3),
        ("dpo", "approver", 22),
    ):
        issue_identity(folder, config, kind, name, now_ms() - age * DAY)
    return folder


def said(*words: str) -> str:
    return CliRunner().invoke(app, words).stdout


def test_status_and_doctor_say_what_ends_and_what_to_do(folder: RegionFolder) -> None:
    text = said("region", "status")
    assert "operator/operator expired 1d ago: felix identity issue operator --kind operator" in text
    assert "client/orders expires in 1d 23h: it renews itself when it is used and may" in text
    assert "approver/dpo expires in 7d 23h: felix identity issue dpo --kind approver" in text
    assert "us-east.acme issuing certificate expires in 34d 23h: felix identity renew-issuing" in text
    assert "fresh" not in text and "root certificate" not in text
    (row,) = json.loads(said("region", "status", "--json"))["items"]
    assert [(each["type"], each["stage"]) for each in row["expiring"]] == [
        ("operator", "expired"), ("client", "urgent"), ("approver", "due"), ("issuing", "urgent"),
    ]  # fmt: skip
    findings = {each.found: each.state for each in _region("us-east")}
    assert [state for finding, state in findings.items() if "client/orders" in finding] == ["problem"]
    assert [state for finding, state in findings.items() if "approver/dpo" in finding] == ["note"]
    assert "is valid until" in said("identity", "renew-issuing")
    assert "issuing certificate" not in said("region", "status")


def test_what_the_broker_has_seen_counts_unless_the_file_is_newer(folder: RegionFolder) -> None:
    now, config = now_ms(), load_config(folder.config)
    elsewhere = ExpiryState("spiffe://us-east.acme/client/elsewhere", "client", now + DAY, "urgent")
    foreign = ExpiryState("spiffe://eu-west.acme/bridge/eu-to-us", "foreign bridge", now + 2 * DAY, "due")
    old_session = ExpiryState("spiffe://us-east.acme/client/fresh", "client", now + 3 * DAY, "due")
    names = [each["name"] for each in expiring(folder, config, now, [foreign, elsewhere, old_session])]
    assert elsewhere.name in names and foreign.name in names and old_session.name not in names


def test_what_a_newer_broker_calls_a_stage_is_shown_as_it_says(folder: RegionFolder) -> None:
    now, config = now_ms(), load_config(folder.config)
    later = ExpiryState("spiffe://eu-west.acme/bridge/eu-to-us", "foreign bridge", now + DAY, "revoked-soon")
    (row,) = [each for each in expiring(folder, config, now, [later]) if each["name"] == later.name]
    assert row["stage"] == "revoked-soon" and row["advice"] == "its region renews it"
