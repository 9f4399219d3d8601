"""How Spark and users come by the source: the shim, `fg.spark`, and what is said when pyspark is not there."""

import subprocess
import sys

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

import faregate as fg

WITHOUT_PYSPARK = "import sys; sys.modules['pyspark'] = None\n"
"""What `import pyspark` finds then is what it finds where it is not installed."""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_shim_has_what_spark_looks_for() -> None:
    import pyspark_faregate

    assert issubclass(pyspark_faregate.DefaultSource, DataSource)
    assert pyspark_faregate.DefaultSource is fg.spark.FaregateSource
    assert fg.spark.FaregateSource.name() == "faregate"
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = pyspark_faregate.Other


def test_the_shim_imports_nothing_until_it_is_asked_and_never_raises() -> None:
    print_loaded = "import pyspark_faregate; print([name for name in ('faregate', 'pyspark') if name in sys.modules])"
    assert run("import sys; " + print_loaded).strip() == "[]"
    said = run(WITHOUT_PYSPARK + "import pyspark_faregate; print(hasattr(pyspark_faregate, 'DefaultSource'))")
    assert "False" in said
    assert "format('faregate') is not available" in said
    assert "pip install 'faregate[spark]'" in said


def test_a_missing_pyspark_is_named_with_its_extra() -> None:
    said = run(
        WITHOUT_PYSPARK
        + "import faregate as fg\n"
        + "try:\n    fg.spark\nexcept fg.MissingExtra as exc:\n    print(exc)\nelse:\n    print('loaded')"
    )
    assert "Spark needs pyspark, which is not installed: pip install 'faregate[spark]'" in said


def test_faregate_alone_does_not_load_spark() -> None:
    assert run("import sys, faregate; print('pyspark' in sys.modules, 'pyarrow' in sys.modules)").split() == [
        "False",
        "False",
    ]


@pytest.mark.services
def test_registering_again_does_no_harm(spark: SparkSession) -> None:
    fg.spark.register(spark)
    fg.spark.register(spark)


def test_what_a_worker_of_spark_imports_has_no_pandas_in_it() -> None:
    """Each query has several workers, and in each pandas would take half as long again as all the rest."""
    loaded = run("import sys, faregate.spark; print('pyarrow' in sys.modules, 'pandas' in sys.modules)")
    assert loaded.split() == ["True", "False"]
