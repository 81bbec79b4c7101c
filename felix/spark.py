"""Felix in Spark: `felix.spark.register(spark)` makes `format("felix")` and `format("felix_audit")` known to a session.

The data sources themselves are felix-mesh's, and this package imports nothing of it and nothing of Spark: felix-mesh names
them as entry points of the group `felix.spark`, each a function that registers one data source with a session.
docs/spark.md is the page for users.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

import felix
from felix.errors import Code, RequestError
from felix.extras import MESH, install_command

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "felix.spark"


def register(spark: Any) -> None:
    """Make Felix's data sources known to `spark`, a `pyspark.sql.SparkSession`. Idempotent.

    Raises RequestError(CONFIG_INVALID): felix-mesh, or what its extra `spark` brings, is not installed in this Python.
    """
    found = entry_points(group=GROUP)
    if not found:
        raise RequestError(
            "Spark's data sources of Felix come with the package felix-mesh, which is not installed here.",
            code=Code.CONFIG_INVALID,
            hint=f"Install felix-mesh {felix.__version__} with its extra spark; in a clone of Felix: pip install '.[spark]'.",
        )
    for registers in [_loaded(entry) for entry in found]:
        registers(spark)


def _loaded(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        raise RequestError(
            f"Spark's data sources of Felix need {error.name}, which is not installed here.",
            code=Code.CONFIG_INVALID,
            hint=install_command(MESH, "spark"),
        ) from error
