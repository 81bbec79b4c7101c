"""What felix-mesh depends on, told to the builder: the list in pyproject.toml, and felix-sdk of the same version.

A build from a clone takes the SDK from the folder `sdk/` beside this file, so that `pip install .` asks no registry for
it. A release names the version instead: `make wheels` sets FELIX_RELEASE=1.
"""

import os
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Dependencies(MetadataHookInterface):
    """The hook that `[tool.hatch.metadata.hooks.custom]` configures."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `dependencies`, which pyproject.toml says are dynamic."""
        sdk = Path(self.root) / "sdk"
        where = f"=={metadata['version']}" if os.environ.get("FELIX_RELEASE") else f" @ {sdk.as_uri()}"
        metadata["dependencies"] = [f"felix-sdk[service]{where}", *self.config["dependencies"]]
