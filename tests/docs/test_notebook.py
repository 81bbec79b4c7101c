"""The notebook under examples/notebooks/ runs in a real ipykernel against a region, and its results are shown as they should be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from doc_commands import needs
from docs.test_sdk_examples import ROOT, environment

pytestmark = [needs("ipykernel"), needs("vega_datasets")]
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

FOLDER = ROOT / "examples" / "notebooks"
CELL_S = 120
IN_A_LOOP_OF_ITS_OWN = """
import asyncio, threading

async def blocks():
    region.list_streams()

def run():
    try:
        asyncio.run(blocks())
    except felix.RequestError as error:
        print(error.code.name, error.sentence)

region = felix.sync.connect("us-east")
other = threading.Thread(target=run)
other.start()
other.join()
region.close()
"""
__all__ = ["environment"]


def shown(cell: Any, kind: str = "text/html") -> str:
    return "".join(str(output.data.get(kind, "")) for output in cell.outputs if "data" in output)


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


@pytest.mark.slow
def test_every_cell_runs_and_shows_tables_and_pictures(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = re.findall(r"^\| `([\w.]+)` \|", (FOLDER / "README.md").read_text(), re.M)
    assert named == [path.name for path in FOLDER.glob("*.ipynb")] == ["weather.ipynb"]
    notebook = nbformat.read(FOLDER / "weather.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code), "the notebook is kept without outputs"
    notebook.cells.append(nbformat.v4.new_code_cell(IN_A_LOOP_OF_ITS_OWN))
    for name in ("FELIX_HOME", "PYTHONPATH"):
        monkeypatch.setenv(name, environment[name])
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    nbclient.NotebookClient(notebook, timeout=CELL_S, kernel_name="python3").execute()
    region, stream, days, counted, hostile, streams, links, _, refused = (
        cell for cell in notebook.cells if cell.cell_type == "code"
    )
    assert "us-east" in shown(region) and "<table>" in shown(region)
    assert "<svg" in shown(stream) and shown(stream).count("<rect") == 4, "two shards, drawn"
    assert "the first 50 of 1,461" in shown(days) and "2012-01-01" in shown(days)
    assert sum(map(int, re.findall(r"': (\d+)", printed(counted).split(")")[0]))) == 1461
    assert "&lt;script&gt;alert(&#x27;rain&#x27;)" in shown(hostile) and "<script" not in shown(hostile)
    assert "acme/weather/seattle" in shown(streams) and "nothing" in shown(links)
    assert "STATE felix.sync would block the event loop" in printed(refused)
