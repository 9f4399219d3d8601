"""`faregate spark`: handlers and jobs on Spark. Each command loads pyspark when it runs, not before."""

import typer

from faregate.cli.spark.jobs import audit, drain, rates, replay
from faregate.cli.spark.run import handover, run

spark = typer.Typer(no_args_is_help=True, help="Run handlers and jobs on Spark.")
spark.command()(run)
spark.command()(handover)
spark.command()(audit)
spark.command()(rates)
spark.command()(drain)
spark.command()(replay)
