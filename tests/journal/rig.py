"""Journals on a simulated disk, driven step by step, and the oracle that says what must be there after a power loss.

The commit thread's work is done by the test itself (`commit`), so that every run of the same script writes the same
steps. What was confirmed is noted on the disk between its operations; the oracle knows from that what had been
promised at any moment of the past.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from faregate.broker.journal import dead_letters
from faregate.broker.journal import log as log_module
from faregate.broker.journal.high_water import read_high_water
from faregate.broker.journal.layout import Layout, prepare
from faregate.broker.journal.log import Log
from faregate.broker.journal.reader import JournalReader
from faregate.errors import FaregateError
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from tests.journal.disk import SimulatedDisk

ROOT = Path("/disk/journal")
SMALL_SEGMENT = 16 * 1024
ROWS_PER_FRAME = 3

LogFactory = Callable[[SimulatedDisk], Log]


def open_log(disk: SimulatedDisk) -> Log:
    """A log with tiny segments on a simulated disk; what a mutant replaces."""
    layout = Layout(ROOT)
    prepare(layout, disk)
    return Log(layout, disk, segment_size=SMALL_SEGMENT)


@contextmanager
def small_frames() -> Iterator[None]:
    """Let few rows fill a frame, so that batches take several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_module, "MOST_ROWS", ROWS_PER_FRAME)
        yield


def envelope(name: str, size: int = 10, **more: Any) -> Envelope:
    return Envelope(
        publication_id=name, type="Noted", source="author", body=(name.encode() * size)[: max(size, 1)], **more
    )


def dead_letter(name: str) -> DeadLetter:
    return DeadLetter.of(
        "reader", envelope(name), "handler-failed", "it broke", 1.0, queue="reader.Noted", tries=3, redeliveries=0
    )


@dataclass
class Unit:
    """What was written as one: after a power loss it is there as a whole or not at all."""

    kind: str
    offsets: list[int]
    names: list[str]
    size: int = 10
    batch: bytes | None = None


@dataclass
class History:
    """What a script did to a log, in order, and what was confirmed when."""

    disk: SimulatedDisk
    units: list[Unit] = field(default_factory=list)

    def confirmed(self, moment: int) -> list[Unit]:
        """What had been promised before the step of that number."""
        notes = [step.note for step in self.disk.history[:moment] if step.operation == "note"]
        return self.units[: max((note for note in notes if isinstance(note, int)), default=0)]


# --- scripts ----------------------------------------------------------------------------------------------

Command = tuple[str, int, int]
"""What to do, with how many messages, of what size."""


def run_script(script: Sequence[Command], factory: LogFactory = open_log, history: History | None = None) -> History:
    """Do what the script says: append, dead and spool write a unit, sync confirms what was written."""
    done = history or History(SimulatedDisk())
    with small_frames():
        log = factory(done.disk)
        for what, count, size in script:
            number = len(done.units)
            names = [f"{number}.{n}" for n in range(count)]
            if what == "sync":
                log.sync()
                done.disk.note(len(done.units))
            elif what == "dead":
                done.units.append(Unit("dead", log.append_dead_letters([dead_letter(name) for name in names]), names))
            else:
                batch = (number + 1).to_bytes(16, "little") if what == "spool" else None
                envelopes = [envelope(name, size) for name in names]
                offsets = log.append(envelopes, [-1] * count, batch=batch)
                done.units.append(Unit("messages", offsets, names, size, batch))
        log.close()
    return done


# --- the oracle -------------------------------------------------------------------------------------------


def contents(disk: SimulatedDisk) -> tuple[dict[int, Envelope], dict[int, str]]:
    """(messages, names of dead letters) by offset, as any other process reads them. Each offset occurs once."""
    reader = JournalReader(ROOT, disk)
    listed = list(reader.envelopes())
    messages = dict(listed)
    assert len(messages) == len(listed), "an offset is there twice"
    assert [offset for offset, _ in listed] == sorted(messages), "the log is out of order"
    dead: dict[int, str] = {}
    for frame, body in reader.dead_letter_frames(0):
        for offset, record in enumerate(dead_letters.decode(body), frame.base):
            assert offset not in dead and offset not in messages, "an offset is there twice"
            dead[offset] = record.envelope.publication_id
    return messages, dead


def check_recovery(
    disk: SimulatedDisk,
    confirmed: Sequence[Unit],
    written: Sequence[Unit],
    factory: LogFactory = open_log,
) -> None:
    """Open what a power loss left. Raises AssertionError when a promise is broken.

    A power loss is no damage: opening never refuses. What was confirmed is there, once, at its offset, unchanged;
    the rest is there as whole units or not at all; the log goes on behind it.
    """
    try:
        log = factory(disk)
    except FaregateError as exc:
        raise AssertionError(f"a power loss was taken for damage: {exc}") from exc
    mark = read_high_water(Layout(ROOT).high_water, disk)
    assert mark is not None and mark.offset == log.next_offset, "the mark does not cover what was recovered"
    check_contents(disk, confirmed, written)
    before = {**contents(disk)[0]}
    known = {unit.batch for unit in written if unit.batch is not None and unit.offsets[0] in before}
    assert log.batches >= known, "a spooled batch is in the log, and would be appended again"
    assert not {unit.batch for unit in written if unit.batch is not None} - known & log.batches, (
        "a spooled batch is not in the log, and would not be appended"
    )
    [offset] = log.append([envelope("after")], [-1])
    log.sync()
    log.close()
    assert all(offset > last for unit in confirmed for last in unit.offsets), "an offset was used again"
    again = factory(disk.copy())
    assert again.next_offset == offset + 1, "what was written after the recovery is not found again"
    assert again.truncated == 0, "what was written after the recovery counts as torn"
    again.close()
    after = contents(disk)[0]
    assert after.pop(offset).publication_id == "after", "what was written after the recovery cannot be read"
    assert after == before, "writing after the recovery changed what was there"


def check_contents(disk: SimulatedDisk, confirmed: Sequence[Unit], written: Sequence[Unit]) -> None:
    """Confirmed units are there; others as a whole or not at all; nothing else is."""
    messages, dead = contents(disk)
    expected_messages: dict[int, Envelope] = {}
    expected_dead: dict[int, str] = {}
    for number, unit in enumerate(written):
        found = dead if unit.kind == "dead" else messages
        present = [offset in found for offset in unit.offsets]
        if number < len(confirmed):
            assert all(present), f"confirmed messages are lost: {unit.names}"
        elif not any(present):
            continue
        assert all(present), f"part of a unit is there: {unit.names}"
        for offset, name in zip(unit.offsets, unit.names, strict=True):
            if unit.kind == "dead":
                expected_dead[offset] = name
            else:
                expected_messages[offset] = envelope(name, unit.size)
    assert messages == expected_messages, "a message is not what was written"
    assert dead == expected_dead, "a dead letter is not what was written"


def check_every_state(script: Sequence[Command], factory: LogFactory = open_log, every: int = 1) -> int:
    """Run a script, lose power in every enumerated way, and recover each; returns how many ways that were."""
    history = run_script(script, factory)
    count = 0
    moments = range(0, len(history.disk.history) + 1, every)
    for moment, left in history.disk.crash_states(moments):
        check_recovery(left, history.confirmed(moment), history.units, factory)
        count += 1
    return count
