"""Faregate on Spark: the source and sink `format("faregate")`.

    import faregate as fg

    fg.spark.register(spark)        # not needed where Spark discovers installed sources by itself
    spark.read.format("faregate").load("/data/journal")

This folder is the only importer of pyspark. Without it, importing this package fails with a sentence that names the
extra. What runs in executors (`reading`, `sealing`, `staging`) needs nothing but the package.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from faregate.errors import MissingExtra

if find_spec("pyspark") is None:
    raise MissingExtra("Spark needs pyspark, which is not installed: pip install 'faregate[spark]'")

from faregate.spark.source import FaregateSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["FaregateSource", "register"]


def register(spark: "SparkSession") -> None:
    """Make `format("faregate")` known to this session; once is enough, more often does no harm."""
    spark.dataSource.register(FaregateSource)
