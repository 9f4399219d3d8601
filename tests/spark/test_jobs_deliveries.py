"""Which messages of a log are whose, and which of them wait: by queue, by a reader of the log, and after a handover."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from faregate.broker.journal import settled
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout, prepare, write_json
from faregate.broker.journal.log import Log
from faregate.columns import to_batch
from faregate.ids import idempotent_id, message_id, root_id
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.log import HANDLED
from faregate.ports.queue import Binding
from faregate.ports.topology import Topology
from faregate.spark.jobs.deliveries import PASSED, UNSETTLED, id_text, message_ids, read_dead_letters, read_deliveries
from faregate.spark.jobs.settlements import plan_journal
from tests.spark.rig import note

QUEUE = "reader.Noted.author"
EARLY = 4
"""How many came before anybody was known."""


def deliveries(folder: Path, change: Callable[[Topology], object], *more: Envelope) -> dict[int, tuple[str, int]]:
    """By offset, the message id and the kind of what goes to the reader: four from before, four to it, and others."""
    layout, disk = Layout(folder), RealDisk()
    prepare(layout, disk)
    topology = Topology()
    topology.add(Binding(node="reader", type="Noted", kind="event", source="author"))
    change(topology)
    write_json(layout.topology, disk, topology)
    log = Log(layout, disk)
    log.append([note(n) for n in range(EARLY)], [-1] * EARLY)
    log.append([note(n, recipients=("reader",)) for n in range(EARLY, 8)], [0] * 4)
    others = [note(8, type="Other"), note(9, source="else"), note(1, replay=1)]
    log.append([*others, *more], [-1] * len(others) + [0] * len(more))
    log.sync()
    log.close()
    [queue] = [each.number for each in topology.queues if not each.is_dead_letter_queue]
    layout.settled_log(0).write_bytes(settled.pack(settled.Record(4, queue, HANDLED, 1, 0, 1.0)))
    plan = plan_journal(folder)
    rows = [row for segment in plan.segments for _, each in read_deliveries(plan, segment) for row in each.to_pylist()]
    assert {(row["node"], row["queue"]) for row in rows} <= {(0, queue)}
    found = {row["offset"]: (id_text(row["hi"], row["lo"]), row["kind"]) for row in rows}
    assert len(found) == len(rows)
    return found


def test_a_queue_has_what_was_sent_to_it(tmp_path: Path) -> None:
    found = deliveries(tmp_path, lambda topology: None)
    assert {offset: kind for offset, (_, kind) in found.items()} == {
        4: HANDLED,
        **dict.fromkeys((5, 6, 7), UNSETTLED),
    }
    assert found[5][0] == message_id("note-5", "reader")


def test_a_reader_of_the_log_has_its_history_as_well(tmp_path: Path) -> None:
    found = deliveries(tmp_path, lambda topology: topology.hand_over(QUEUE, "log", 1, history=EARLY))
    # It began at 1, so 0 is not its own; what was settled in the queue stays so.
    assert {offset: kind for offset, (_, kind) in found.items()} == {
        4: HANDLED,
        **dict.fromkeys((1, 2, 3, 5, 6, 7), UNSETTLED),
    }


def test_what_lies_before_a_view_was_dealt_with_by_the_one_before(tmp_path: Path) -> None:
    def there_and_back(topology: Topology) -> None:
        topology.hand_over(QUEUE, "log", 0, history=EARLY)
        topology.hand_over(QUEUE, "queue", 6)

    found = deliveries(tmp_path, there_and_back)
    assert {offset: kind for offset, (_, kind) in found.items()} == {
        4: HANDLED,
        5: PASSED,
        6: UNSETTLED,
        7: UNSETTLED,
    }


def test_one_without_an_id_is_known_by_its_content(tmp_path: Path) -> None:
    nameless = Envelope(publication_id="", type="Noted", source="author", body=b"x", recipients=("reader",))
    found = deliveries(tmp_path, lambda topology: None, nameless)
    known = idempotent_id("reader", "Noted", b"x".hex())
    assert found[11][0] == known
    log = Log(Layout(tmp_path), RealDisk())
    named = note(5, recipients=("reader",))
    records = [DeadLetter.of("reader", each, "permanent", "", 7.0, queue=QUEUE) for each in (nameless, named)]
    log.append_dead_letters(records)
    log.sync()
    log.close()
    [rows] = read_dead_letters(plan_journal(tmp_path))
    texts = [known, message_id("note-5", "reader")]
    assert rows == [("reader", bytes.fromhex(each.replace("-", "")), 7.0) for each in texts]


def test_ids_by_columns_are_those_one_by_one() -> None:
    """Also where one was made up by a foreign sender: then all of the batch go one by one."""
    rows, places, nodes = np.array([0, 2, 2, 1]), np.array([1, 0, 1, 0]), ("billing", "reader")
    for foreign in ("", "order-17"):
        names = [root_id(), root_id(), foreign or root_id()]
        envelopes = [Envelope(publication_id=each, type="Noted", source="author") for each in names]
        batch = to_batch(envelopes, [0] * 3, range(3), 0)
        hi, lo = message_ids(batch, rows, places, nodes)
        found = [id_text(*pair) for pair in zip(hi.tolist(), lo.tolist(), strict=True)]
        pairs = zip(rows.tolist(), places.tolist(), strict=True)
        assert found == [message_id(envelopes[row].publication_id, nodes[place]) for row, place in pairs]


def test_an_empty_digest_in_the_log_is_none_and_one_of_another_length_is_like_no_other(tmp_path: Path) -> None:
    digests = {11: b"", 12: b"\1" * 8, 13: b"\1" * 16}
    log_digests: dict[int, int | None] = {}
    more = (note(n, recipients=("reader",), body_digest=digest) for n, digest in digests.items())
    deliveries(tmp_path, lambda topology: None, *more)
    plan = plan_journal(tmp_path)
    for segment in plan.segments:
        for _, each in read_deliveries(plan, segment):
            log_digests |= {row["offset"]: row["digest"] for row in each.to_pylist()}
    first = int.from_bytes(b"\1" * 8, "big")
    assert log_digests[11] is None and log_digests[13] == first
    assert log_digests[12] not in (None, first)
