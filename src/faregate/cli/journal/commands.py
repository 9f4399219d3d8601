"""`faregate journal`: look at a journal, check, repair and upgrade it, export and archive it, back it up.

What needs pyarrow is imported by the command that uses it: the rest of the command line starts without it.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from faregate.cli.journal.progress import JournalPath, folder_of, plain_errors, progress
from faregate.cli.output import AsJson, answer
from faregate.errors import ConfigurationError
from faregate.units import bytes_text, counted

if TYPE_CHECKING:
    from faregate.broker.journal.reader import JournalReader

journal = typer.Typer(
    no_args_is_help=True, help="Look at a journal, check and repair it, export and archive it, back it up, upgrade it."
)

Types = Annotated[list[str] | None, typer.Option("--type", help="Only messages of this type; may be repeated.")]


@journal.command()
def info(path: JournalPath, as_json: AsJson = False) -> None:
    """Show what a journal holds: offsets, messages, what waits in its queues, and who reads and writes it.

    Changes nothing, and works beside a running bus.
    """
    from faregate.cli.journal import info as journal_info

    with plain_errors():
        told = journal_info.describe(folder_of(path))
    answer(told, lambda: journal_info.show(told), as_json=as_json)


@journal.command()
def verify(path: JournalPath, as_json: AsJson = False) -> None:
    """Read every byte of a journal and list what is damaged. Exits with 1 when anything is.

    Changes nothing. Beside a running bus everything that is confirmed is checked.
    """
    from faregate.broker.journal.verify import inspect
    from faregate.cli.journal import findings as journal_findings

    root = folder_of(path)
    with plain_errors(), progress("verifying") as tell:
        found = inspect(root, progress=tell)
    answer(journal_findings.report(root, found), lambda: journal_findings.show_verdict(root, found), as_json=as_json)
    if found.problems:
        raise typer.Exit(1)


@journal.command()
def repair(
    path: JournalPath,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; otherwise only say what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Set a damaged journal right, and say exactly which offsets are lost. Nothing is deleted.

    What is damaged goes to the folder quarantine/ within the journal; what is sound stays, with its offsets. Without
    --yes nothing is changed. No bus may run on the journal. Exits with 1 while there is anything left to repair.
    """
    from faregate.broker.journal.repair import repair as mend
    from faregate.cli.journal import findings as journal_findings

    root = folder_of(path)
    with plain_errors(), progress("looking") as tell:
        before, after = mend(root, act=yes, progress=tell)
    left = after if after is not None else before
    is_done = not left.problems and not left.steps
    done = {"steps": [step.what for step in before.steps], "repaired": after is not None, "sound": is_done}
    told = {**journal_findings.report(root, before), **done}
    answer(told, lambda: journal_findings.show_repair(root, before, after), as_json=as_json)
    if not is_done:
        raise typer.Exit(1)


@journal.command()
def tail(
    path: JournalPath,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    count: Annotated[int, typer.Option("-n", min=0, max=1_000_000, help="How many messages to begin with.")] = 20,
    types: Types = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each message as a line of JSON.")] = False,
) -> None:
    """Show the last messages of a journal: offset, time (UTC), type, source, key, publication id, and how they begin.

    Changes nothing, and works beside a running bus.
    """
    from faregate.broker.journal.reader import JournalReader
    from faregate.cli.journal.tail import tail_journal

    with plain_errors():
        try:
            tail_journal(JournalReader(folder_of(path)), count, types or [], follow=follow, as_json=as_json)
        except KeyboardInterrupt:
            raise typer.Exit from None


@journal.command()
def export(
    path: JournalPath,
    out: Annotated[Path, typer.Argument(help="The file to write.", metavar="OUT.parquet")],
    start: Annotated[str | None, typer.Option(help="First offset, or a time like 2026-05-01T12:00 (UTC).")] = None,
    end: Annotated[str | None, typer.Option(help="Offset or time to stop before.")] = None,
    types: Types = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write messages to a Parquet file: all of them, or a stretch, or some types.

    Works beside a running bus. The file is there as a whole or not at all.
    """
    from faregate.broker.journal.export import export_parquet
    from faregate.broker.journal.reader import JournalReader

    with plain_errors(), progress("exporting", in_bytes=False) as tell:
        reader = JournalReader(folder_of(path))
        written = export_parquet(
            reader,
            out,
            start=_offset(reader, start, "--start"),
            end=_offset(reader, end, "--end"),
            types=types or [],
            overwrite=force,
            progress=tell,
        )
    told = f"wrote {counted(written.rows, 'message')} to {out} ({bytes_text(written.bytes)})"
    answer({"file": str(out), **written._asdict()}, told, as_json=as_json)


@journal.command()
def archive(
    path: JournalPath,
    target: Annotated[str, typer.Argument(help="s3://BUCKET/PREFIX or file:/PATH.", metavar="TARGET")],
    allow_gap: Annotated[
        bool, typer.Option("--allow-gap", help="Go on although messages were removed before they were archived.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Keep the full segments of a journal as Parquet files, by day and type, before retention removes them.

    A run archives what is full now, and ends: run it every few minutes (cron, a
    systemd timer). Works beside a running bus. If it is interrupted, run it
    again: it goes on, no message is archived twice, and none is left out.

    From the first run on, retention keeps what is not archived: the archive is a
    reader of the journal, which 'faregate journal info' lists. Rights for S3 come
    from the environment, ~/.aws, or the role of the machine. Spark reads archive
    and journal as one log with its option archive.
    """
    from faregate.archive.target import public
    from faregate.broker.journal.archive import archive_journal

    root = folder_of(path)
    with plain_errors(), progress("archiving", in_bytes=False) as tell:
        done = archive_journal(root, target, allow_gap=allow_gap, progress=tell)
    shown = public(target)
    told = (
        f"archived {counted(done.messages, 'message')} of {counted(done.segments, 'segment')} in "
        f"{counted(done.files, 'file')} ({bytes_text(done.bytes)}); {shown} has the offsets {done.start:,} to "
        f"{done.end - 1:,}, and {done.left:,} follow in the journal"
        if done.segments
        else f"nothing to archive: no segment is full that is not in {shown} already"
    )
    answer({"path": str(root), "target": shown, **done._asdict()}, told, as_json=as_json)


@journal.command()
def backup(
    path: JournalPath,
    target: Annotated[Path, typer.Argument(help="An empty or new folder.", metavar="TARGET")],
    as_json: AsJson = False,
) -> None:
    """Copy a journal, also beside a running bus, and check the copy.

    Everything that was confirmed before is in the copy. Messages that were handled while it was made may be handled
    again when the copy is used. The copy is a journal itself. quarantine/ is not copied.
    """
    _copy(folder_of(path), folder_of(target), "backed up", as_json)


@journal.command()
def restore(
    source: Annotated[Path, typer.Argument(help="The backup.", metavar="SOURCE")],
    target: Annotated[Path, typer.Argument(help="An empty or new folder.", metavar="TARGET")],
    as_json: AsJson = False,
) -> None:
    """Make a journal from a backup, in an empty or new folder, and check it."""
    _copy(folder_of(source), folder_of(target), "restored", as_json)


@journal.command()
def upgrade(path: JournalPath, as_json: AsJson = False) -> None:
    """Rewrite what an older version of Faregate has written, in the form of this one.

    Not needed to go on with a journal, but it makes it smaller and faster to read. No bus may run on it. If it is
    interrupted, run it again: it goes on.
    """
    from faregate.broker.journal.upgrade import upgrade as bring_up

    root = folder_of(path)
    with plain_errors(), progress("rewriting", in_bytes=False) as tell:
        done = bring_up(root, tell)
    told = (
        f"{root} is in version {done.version} of the format; rewrote {counted(done.segments, 'segment')}, "
        f"{bytes_text(done.bytes_before)} before and {bytes_text(done.bytes)} now"
    )
    answer({"path": str(root), **done._asdict()}, told, as_json=as_json)


def _copy(source: Path, target: Path, done: str, as_json: bool) -> None:
    from faregate.broker.journal.backup import copy_journal
    from faregate.cli.journal import findings as journal_findings

    with plain_errors(), progress("copying") as copying, progress("verifying") as checking:
        found = copy_journal(source, target, copying=copying, checking=checking)
    answer(
        {"source": str(source), "target": str(target), **journal_findings.report(target, found)},
        f"{done} {counted(found.checked['messages'], 'message')} (the next offset is {found.end:,}) to {target}, "
        f"{bytes_text(found.checked['bytes'])}; the copy was read again and is sound",
        as_json=as_json,
    )


def _offset(reader: "JournalReader", text: str | None, option: str) -> int | None:
    """An offset as it is, a time as the first offset appended then or later."""
    if text is None:
        return None
    if text.isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(
            f"{option} takes an offset or a time, for example 1200 or 2026-05-01T12:00; got {text!r}"
        ) from None
    return reader.offset_at((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
