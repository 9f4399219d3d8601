"""The discovery shim: Spark looks into every installed package named pyspark_* for a `DefaultSource`.

It is asked in every Spark application of this environment, whether that uses Faregate or not. So it imports nothing
until asked, and it never raises: when Faregate cannot be loaded Spark is told that there is no source, and the reason
is logged.
"""

import logging
from typing import Any

__all__ = ["DefaultSource"]


def __getattr__(name: str) -> Any:
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from faregate.spark.format import FaregateSource
    except Exception as exc:
        logging.getLogger("faregate.spark").warning("format('faregate') is not available: %s", exc)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {exc}") from exc
    return FaregateSource
