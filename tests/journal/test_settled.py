"""Side logs: records that are written together are those that one by one would be."""

import pytest

from faregate.broker.journal import settled
from faregate.broker.journal.settled import RECORD_BYTES, Record
from faregate.ports.log import OUTCOMES, STARTED

HANDLED = OUTCOMES["handled"]


@pytest.mark.parametrize("tries", [1, 0xFFFF + 1])
def test_records_that_are_written_together_are_read_one_by_one(tries: int) -> None:
    records = [Record(7, 3, STARTED, 1, 0, 0.0), Record(8, 3, HANDLED, tries, 2, 1.5)]
    data = settled.pack_all(records)
    assert data == b"".join(map(settled.pack, records))
    assert len(data) == 2 * RECORD_BYTES
    assert list(settled.walk(data)) == [records[0], records[1]._replace(tries=min(tries, 0xFFFF))]


def test_nothing_is_no_record() -> None:
    assert settled.pack_all([]) == b""
