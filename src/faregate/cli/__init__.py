"""The command line: the composition root, where everything may be imported."""

import sys

import typer

from faregate import __version__
from faregate.cli.asyncapi import asyncapi
from faregate.cli.bench.commands import bench
from faregate.cli.cancel import cancel
from faregate.cli.capacity.commands import capacity
from faregate.cli.dead import dead
from faregate.cli.demo import add_demo
from faregate.cli.journal.commands import journal
from faregate.cli.output import fail
from faregate.cli.pause import pause, resume
from faregate.cli.publish import publish
from faregate.cli.rabbitmq.commands import rabbitmq
from faregate.cli.run import run
from faregate.cli.spark.commands import spark
from faregate.cli.status import status
from faregate.cli.store import store
from faregate.errors import FaregateError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # paragraphs are wrapped: otherwise the lines of a docstring stay
    help="Faregate: an exactly-once service bus for Python.",
)
add_demo(app)
app.command()(run)
app.command()(publish)
app.command()(status)
app.command()(asyncapi)
app.command()(pause)
app.command()(resume)
app.command()(cancel)
app.command()(bench)
app.add_typer(capacity, name="capacity")
app.add_typer(dead, name="dead")
app.add_typer(journal, name="journal")
app.add_typer(rabbitmq, name="rabbitmq")
app.add_typer(spark, name="spark")
app.add_typer(store, name="store")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"faregate {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Faregate: an exactly-once service bus for Python."""


def main() -> None:
    """Errors that Faregate raises on purpose become one sentence and an exit status; others keep their traceback."""
    try:
        app()
    except FaregateError as exc:
        sys.exit(fail(exc, as_json="--json" in sys.argv))


__all__ = ["app", "main"]
