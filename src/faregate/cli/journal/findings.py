"""What `faregate journal verify` and `repair` say: for programs as a dictionary, for people in sentences."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.text import Text

from faregate.broker.journal.findings import Finding, Inspection, offsets
from faregate.cli.output import say
from faregate.plain import plain
from faregate.units import bytes_text, counted

_SHOWN_FINDINGS = 50


def report(root: Path, found: Inspection) -> dict[str, Any]:
    return {
        "path": str(root),
        "id": found.id,
        "writer": found.writer,
        "sound": not found.problems,
        "end": found.end,
        "checked": found.checked,
        "problems": [_finding(root, problem) for problem in found.problems],
        "notes": [_finding(root, note) for note in found.notes],
        "more": found.more,
        "lost": [list(stretch) for stretch in found.lost()],
    }


def _finding(root: Path, finding: Finding) -> dict[str, Any]:
    return {
        "file": str(finding.path.relative_to(root)),
        "position": finding.at_byte,
        "what": finding.what,
        "lost": list(finding.lost) if finding.lost is not None else None,
    }


def _show_findings(root: Path, found: Inspection) -> None:
    for findings, style in ((found.problems, "red"), (found.notes, "yellow")):
        for finding in findings[:_SHOWN_FINDINGS]:
            where = str(finding.path.relative_to(root))
            if finding.at_byte is not None:
                where += f" at {finding.at_byte}"
            lost = f" ({offsets(*finding.lost)})" if finding.lost is not None else ""
            say(Text.assemble((where, style), f" {plain(finding.what)}{lost}"))
        if len(findings) > _SHOWN_FINDINGS:
            say(f"… and {len(findings) - _SHOWN_FINDINGS:,} more; --json lists them")


def show_verdict(root: Path, found: Inspection) -> None:
    _show_findings(root, found)
    checked = found.checked
    say(
        f"read {bytes_text(checked['bytes'])}: {counted(checked['messages'], 'message')} and "
        f"{counted(checked['dead_letters'], 'dead letter')} in {counted(checked['segments'], 'segment')}, "
        f"{counted(checked['settlements'], 'settlement')}, "
        f"{counted(checked['batches'], 'spooled batch', 'spooled batches')}",
        "dim",
    )
    if not found.problems:
        beside = f", as far as process {found.writer} has confirmed it" if found.writer is not None else ""
        say(f"The journal is sound{beside}.", "green")
        return
    say(f"{counted(len(found.problems) + found.more, 'problem')}. {_lost_text(found.lost())}", "bold red")
    say(f"'faregate journal repair {root}' says what can be done.")


def _lost_text(lost: Iterable[tuple[int, int]]) -> str:
    stretches = list(lost)
    if not stretches:
        return "No message is lost."
    count = sum(last - first + 1 for first, last in stretches)
    listed = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in stretches[:20])
    return f"Lost: {counted(count, 'offset')} ({listed}{', …' if len(stretches) > 20 else ''})."


def show_repair(root: Path, before: Inspection, after: Inspection | None) -> None:
    _show_findings(root, before)
    if not before.steps:
        told = "There is nothing to repair." if not before.problems else "This cannot be repaired: restore a backup."
        say(told, "green" if not before.problems else "bold red")
        return
    say("done:" if after is not None else "would be done:", "bold")
    for step in before.steps:
        say(f"  {plain(step.what)}")
    say(_lost_text(before.lost()))
    if after is None:
        say(f"Nothing was changed; 'faregate journal repair {root} --yes' does it.")
    elif after.problems or after.steps:
        say("This is left:", "bold red")
        _show_findings(root, after)
    else:
        say("The journal is sound again; what was taken out is in quarantine/.", "green")
