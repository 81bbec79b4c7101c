"""Links between pages lead somewhere, headings included; every decision is in the index."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part == "demo-state" for part in path.relative_to(ROOT).parts)
)
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
