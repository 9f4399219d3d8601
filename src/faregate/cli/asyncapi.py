"""`faregate asyncapi`: the contracts of a bus, as an AsyncAPI document and as a page."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from faregate.asyncapi import document, page
from faregate.cli.load import BusName, load_bus
from faregate.cli.output import errors
from faregate.errors import ConfigurationError


def asyncapi(
    target: BusName,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the document to this file.", metavar="FILE")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page for people to this file.", metavar="FILE")
    ] = None,
    title: Annotated[str | None, typer.Option(help="The title; the names of the nodes unless given.")] = None,
    api_version: Annotated[str, typer.Option(help="The version of your application.")] = "1.0.0",
) -> None:
    """Describe what the nodes of a bus send and handle, as an AsyncAPI document.

    It is JSON, which readers of YAML take, too. Without --output and --html it
    goes to standard output. Nothing is started or opened, and no password gets
    into it.
    """
    made = document(load_bus(target), title=title, version=api_version)
    text = json.dumps(made, indent=2) + "\n"
    if output is None and html is None:
        sys.stdout.write(text)
    for path, content in ((output, text), (html, None if html is None else page(made))):
        if path is not None and content is not None:
            _write(path, content)


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as exc:
        raise ConfigurationError(f"{path} cannot be written: {exc.strerror}") from exc
    errors.print(f"wrote {path}", markup=False)
