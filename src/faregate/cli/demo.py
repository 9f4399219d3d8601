"""Finds `faregate demo`, which is an example and may be missing."""

from importlib import import_module

import typer

from faregate.errors import ConfigurationError

DEMO = "faregate.examples.demo.command"


def add_demo(app: typer.Typer) -> None:
    """Add the command; where there are no examples, one that says so whatever its options are."""
    try:
        app.command()(import_module(DEMO).demo)
    except ModuleNotFoundError as exc:
        if exc.name is None or not DEMO.startswith(exc.name):
            raise
        any_option = {"ignore_unknown_options": True, "allow_extra_args": True}
        app.command("demo", context_settings=any_option)(_missing)


def _missing() -> None:
    """The proof. It is not in this installation."""
    raise ConfigurationError(
        "the demo is an example, and this copy of Faregate has no examples: install the wheel (pip install faregate), "
        "or run ./dev demo in a checkout"
    )
