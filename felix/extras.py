"""The command that installs an extra of one of Felix's packages: the hint if a dependency is missing.

The command names the dependencies themselves, as the installed package's metadata has them. So it is right however Felix came
here (a clone, a wheel, a registry), and asks no registry for Felix.
"""

from __future__ import annotations

from typing import Final

SDK: Final = "felix-sdk"
MESH: Final = "felix-mesh"


def install_command(package: str, extra: str) -> str:
    """`pip install 'aioquic<2,>=1.3'`; where the package itself is not installed (a tree on the path), what to install in words."""
    # Imported here: it loads slowly, and only errors need it.
    from importlib.metadata import PackageNotFoundError, requires

    try:
        wanted = [text.split(";") for text in requires(package) or ()]
    except PackageNotFoundError:
        wanted = []
    marker = f"extra == '{extra}'"
    found = [text[0].strip() for text in wanted if text[-1].strip().replace('"', "'") == marker]
    if not found:
        return f"Install {package} with its extra {extra}."
    return "pip install " + " ".join(f"'{requirement}'" for requirement in found)
