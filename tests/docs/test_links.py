"""Links between pages lead somewhere, headings included; every decision is in the index, and paths and layers are those of the tree."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part == "demo-state" for part in path.relative_to(ROOT).parts)
)
GUIDES = ("CONTRIBUTING.md", "docs/README.md", "docs/contributing-map.md")
"""Pages that lead through the tree: what looks like a path in them is one."""
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """What a heading can be linked by: lower case, spaces to hyphens, other signs left out."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, heading = link.partition("#")
        target = (page.parent / name) if name else page
        assert target.exists(), f"{page.name}: {link} is not there"
        if heading:
            assert heading in anchors(target), f"{page.name}: {link} has no such heading"


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs" / "decisions").glob("*.md"):
        number, title = page.read_text().splitlines()[0].removeprefix("# ").split(" ", 1)
        assert f"| [{number}](decisions/{page.name}) | {title} |" in index
        assert page.name.startswith(f"{number}-")


@pytest.mark.parametrize("guide", GUIDES)
def test_paths_in_guides_are_there(guide: str) -> None:
    tops = "felix|keys|policy|audit|region|bridge|cli|sdk|tests|docs|examples|benchmarks"
    paths = set(re.findall(rf"`((?:{tops})/[\w./-]*)`", (ROOT / guide).read_text()))
    assert len(paths) > 5
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_picture_of_the_layers_is_the_import_contract() -> None:
    picture = (ROOT / "docs" / "pictures" / "layers.svg").read_text()
    titles = re.findall(r'<text class="title"[^>]*>([^<]+)</text>', picture)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(
        contract["layers"]
        for contract in contracts
        if contract["type"] == "layers" and "cli" in contract["layers"]
    )
    drawn = [name for layer in layers for name in layer.split(" | ")]
    assert titles[: len(drawn)] == drawn
    ports = re.findall(r'<text class="path"[^>]*>([^<]+)</text>', picture)
    assert len(ports) == len(titles) - len(drawn)
    assert all((ROOT / port).is_file() for port in ports)
