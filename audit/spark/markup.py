"""Text for HTML and SVG: escaped, and without characters that hide or reorder what stands beside them. Pure."""

from __future__ import annotations

import html

from felix.visible import visible


def escape(text: str) -> str:
    """As `html.escape`, controls and format characters as escapes (`felix.visible`)."""
    return html.escape(visible(text))
