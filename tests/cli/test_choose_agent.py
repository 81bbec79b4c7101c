"""Which bridge agent a command is about where it names none."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from cli.agent import agent_files, choose_agent
from cli.process import PidFile
from felix.errors import RequestError
from region.folder import RegionFolder


@pytest.fixture
def bridges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two in one region, none of which runs."""
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    monkeypatch.delenv("FELIX_REGION", raising=False)
    folder = RegionFolder.of("us-east")
    names = ["us-east-to-ap-south", "us-east-to-eu-west"]
    for name in names:
        config = agent_files(folder, name).config
        config.parent.mkdir(parents=True)
        config.touch()
    (folder.root / "profile.json").touch()
    return names


def test_of_several_the_one_that_runs_is_meant_where_something_is_done_to_a_process(
    bridges: list[str],
) -> None:
    stopped, runs = bridges
    with pytest.raises(RequestError, match=f"several bridges.*{stopped}.*{runs}"):
        choose_agent("", "", running=True)
    pid = PidFile(agent_files(RegionFolder.of("us-east"), runs).pid, "The bridge", "felix bridge down")
    with closing(pid):
        pid.announce()
        assert choose_agent("", "", running=True).name == runs
        assert choose_agent(stopped, "", running=True).name == stopped
        with pytest.raises(RequestError, match="several bridges"):
            choose_agent("", "")
