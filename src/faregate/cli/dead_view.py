"""Dead letters as people read them, and as JSON."""

import base64
import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from faregate.bus.dead_letters import body_of
from faregate.cli.output import say
from faregate.cli.table import Cell, Column, fits, room, show_table
from faregate.errors import Undecodable
from faregate.message import Envelope
from faregate.plain import plain
from faregate.ports.dead_letter import DeadLetter
from faregate.units import age, counted, iso

_STYLES = {"open": "red", "replayed": "yellow", "resolved": "green", "discarded": "dim"}
_COLUMNS = [Column("ID", is_whole=True), *map(Column, ("TYPE", "NODE", "REASON", "STATUS", "LAST FAILED"))]
_SHORT_ID = 13
_TIMES = ("first_failed_at", "last_failed_at", "changed_at")
_LISTED = (
    *("node", "type", "source", "reason", "status", "error", "publication_id", "correlation_id", "key", "queue"),
    *("tries", "redeliveries", "copies", "replays", "first_failed_at", "last_failed_at", "changed_by", "changed_at"),
)


def as_json(letter: DeadLetter) -> dict[str, Any]:
    """What a listing tells of a letter."""
    told: dict[str, Any] = {"id": letter.message_id, **{name: getattr(letter, name) for name in _LISTED}}
    told |= {name: iso(told[name]) for name in _TIMES if told[name] is not None}
    return {**told, "error": letter.error.partition("\n")[0]}


def as_whole_json(letter: DeadLetter) -> dict[str, Any]:
    """Everything about one letter. A body that cannot be read comes as `body_base64`."""
    envelope = letter.envelope
    told = {**as_json(letter), "error": letter.error, "causation_id": envelope.causation_id, "kind": envelope.kind}
    told |= {"sent_at": iso(envelope.sent_at), "content_type": envelope.content_type, "headers": envelope.headers}
    body, readable = _body(envelope)
    return {**told, "body": body} if readable else {**told, "body": None, "body_base64": body}


def _body(envelope: Envelope) -> tuple[Any, bool]:
    try:
        body = body_of(envelope)
        json.dumps(body)
    except (Undecodable, TypeError, ValueError):
        return base64.b64encode(envelope.body).decode(), False
    return body, True


# --- for people -----------------------------------------------------------------------------------------------


def show_list(letters: Sequence[DeadLetter], *, more: bool, filtered: bool = False) -> None:
    if not letters:
        say("no dead letters" + " that fit these filters" * filtered)
        return
    now = time.time()
    rows = _rows(letters, [each.message_id for each in letters], now)
    if not fits(_COLUMNS, rows, room()):
        rows = _rows(letters, _beginnings([each.message_id for each in letters]), now)
    errors = [Text(plain(each.error.partition("\n")[0]), "dim") for each in letters]
    show_table(_COLUMNS, rows, below=errors)
    counts = Counter(letter.status for letter in letters)
    say(f"{', '.join(f'{count:,} {status}' for status, count in counts.items())}{', and more' * more}")


def _rows(letters: Sequence[DeadLetter], ids: Sequence[str], now: float) -> list[list[Cell]]:
    return [
        [
            *map(plain, (message_id, each.type, each.node, each.reason)),
            Text(each.status, _STYLES[each.status]),
            age(each.last_failed_at, now),
        ]
        for each, message_id in zip(letters, ids, strict=True)
    ]


def _beginnings(ids: Sequence[str]) -> list[str]:
    """As much of each id as tells it from the others; the commands take that for the whole id."""
    length, different = _SHORT_ID, len(set(ids))
    while len({each[:length] for each in ids}) < different:
        length += 1
    return [each[:length] for each in ids]


def show_letter(letter: DeadLetter) -> None:
    now, envelope = time.time(), letter.envelope
    failed = f"{iso(letter.last_failed_at)}, {age(letter.last_failed_at, now)}"
    if letter.first_failed_at != letter.last_failed_at:
        failed += f"; first {iso(letter.first_failed_at)}"
    counts = (
        counted(letter.tries, "try", "tries"),
        counted(letter.redeliveries, "redelivery", "redeliveries"),
        counted(letter.replays, "replay"),
        counted(letter.copies, "copy", "copies"),
    )
    status: str = letter.status
    if letter.changed_at is not None:
        who = f" by {letter.changed_by}" if letter.changed_by else ""
        status += f" (changed{who} {age(letter.changed_at, now)})"
    facts = {
        "id": letter.message_id,
        "type": f"{letter.type} ({envelope.kind})",
        "node": letter.node,
        "source": letter.source,
        "status": status,
        "reason": letter.reason,
        "failed": failed,
        "counts": ", ".join(counts),
        "sent": iso(envelope.sent_at),
        "publication": letter.publication_id,
        "correlation": letter.correlation_id,
        "caused by": envelope.causation_id or "nothing: it is a root",
        "key": letter.key or "",
    }
    for name, value in facts.items():
        if value:
            style = _STYLES[letter.status] if name == "status" else ""
            say(Text.assemble((f"{name:<12}", "bold"), (plain(value), style)))
    if envelope.headers:
        _show_part("headers", [f"{name}: {value}" for name, value in envelope.headers.items()])
    body, readable = _body(envelope)
    if readable:
        _show_part("body", json.dumps(body, indent=2, ensure_ascii=False).splitlines())
    else:
        _show_part(f"body ({envelope.content_type}, in base64)", [body])
    # The first line is also the last of the traceback.
    _, _, trace = letter.error.partition("\n\n")
    _show_part("error", (trace or letter.error).splitlines())


def _show_part(heading: str, lines: Sequence[str]) -> None:
    say(f"\n{heading}", "bold")
    for line in lines:
        say(f"  {plain(line)}")
