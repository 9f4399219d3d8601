"""What the journal commands share: their path, their progress bar, and plain words for errors of the disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Annotated, Protocol

import typer
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from faregate.cli.output import errors

JournalPath = Annotated[Path, typer.Argument(help="The journal's folder.", metavar="PATH")]

_SHORT_SECONDS = 0.3
_REDRAW_SECONDS = 0.05


class Told(Protocol):
    def __call__(self, done: int, total: int) -> None: ...


def folder_of(path: Path) -> Path:
    """The folder; a bus' URL such as `journal:./data?retain=7d` is understood, too."""
    text = str(path)
    return Path(text.removeprefix("journal:").partition("?")[0]) if text.startswith("journal:") else path


@contextmanager
def progress(what: str, *, in_bytes: bool = True) -> Iterator[Told]:
    """A bar on standard error, if that is a terminal and the work takes long."""
    if not errors.is_terminal:
        yield lambda done, total: None
        return
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if in_bytes else MofNCompleteColumn(),
        TimeRemainingColumn(),
    ]
    bar = Progress(*columns, console=errors, transient=True, auto_refresh=False)
    task = bar.add_task(what, total=None)
    drawn = monotonic()
    shown = False

    def tell(done: int, total: int) -> None:
        nonlocal drawn, shown
        now = monotonic()
        if now - drawn < (_REDRAW_SECONDS if shown else _SHORT_SECONDS):
            return
        if not shown:
            bar.start()
            shown = True
        drawn = now
        bar.update(task, completed=done, total=total, refresh=True)

    try:
        yield tell
    finally:
        if shown:
            bar.stop()


@contextmanager
def plain_errors() -> Iterator[None]:
    """A file that cannot be read or written is one sentence, not a traceback."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as exc:
        from faregate.errors import JournalFailed

        where = f"{exc.filename}: " if exc.filename else ""
        raise JournalFailed(f"{where}{exc.strerror or exc}") from exc
