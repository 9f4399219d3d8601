"""Jobs on a journal whose old segments retention has removed."""

import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import faregate as fg
from faregate.broker.journal import settled
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout, prepare, write_json
from faregate.broker.journal.log import Log
from faregate.errors import ConfigurationError
from faregate.ports.log import HANDLED
from faregate.ports.queue import Binding
from faregate.ports.topology import Topology
from tests.spark.rig import SMALL_SEGMENT, note, truncate

COUNT = 300


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """A journal of some segments, handled but for the last message; the first segment is gone."""
    layout, disk = Layout(tmp_path / "journal"), RealDisk()
    prepare(layout, disk)
    topology = Topology()
    topology.add(Binding(node="reader", type="Noted", kind="event", source="author"))
    write_json(layout.topology, disk, topology)
    [queue] = [each.number for each in topology.queues if not each.is_dead_letter_queue]
    log = Log(layout, disk, segment_size=SMALL_SEGMENT // 2)
    for start in range(0, COUNT, 10):
        log.append([note(n, recipients=("reader",)) for n in range(start, start + 10)], [0] * 10)
    log.sync()
    log.close()
    bases = layout.segment_bases(disk)
    assert len(bases) > 2
    for base, end in zip(bases, [*bases[1:], COUNT - 1], strict=True):
        records = [settled.Record(n, queue, HANDLED, 1, 0, time.time()) for n in range(base, end)]
        layout.settled_log(base).write_bytes(b"".join(map(settled.pack, records)))
    truncate(layout.root)
    return layout.root


@pytest.mark.services
def test_what_was_removed_is_not_judged(spark: SparkSession, cut: Path) -> None:
    first = Layout(cut).segment_bases(RealDisk())[0]
    assert 0 < first < COUNT
    found = fg.spark.audit(spark, journal=cut, at_rest=True)
    assert found.table[0]["published"] == COUNT - first
    assert (found.table[0]["handled"], found.table[0]["in_flight"]) == (COUNT - first - 1, 1)
    assert [(each.kind, each.offset) for each in found.findings.collect()] == [("in flight", COUNT - 1)]
    assert (found.summary["from_offset"], found.summary["to_offset"]) == (first, COUNT)
    assert f"the log begins at offset {first}: what was before it was removed and is not judged" in found.notes
    ended = fg.spark.rates(spark, journal=cut, window="1d").agg({"handled": "sum"}).collect()[0][0]
    assert ended == COUNT - first - 1
    with pytest.raises(ConfigurationError, match=f"was removed by retention: .* begins at {first}"):
        fg.spark.replay(spark, journal=cut, start=0)
