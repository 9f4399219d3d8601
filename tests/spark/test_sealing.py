"""Rows become publications: what is given is kept, what is missing is filled in, what cannot be is refused."""

from hashlib import sha256
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
)

from faregate.columns import SCHEMA, to_envelopes
from faregate.errors import InvalidName, Unroutable
from faregate.message import Envelope
from faregate.ports.queue import Binding
from faregate.ports.topology import Topology
from faregate.spark.schema import COLUMNS, stored
from faregate.spark.sink.publications import WRITABLE, BatchSealer, UnfitColumns, UnfitValue, check_columns


def rows(**columns: Any) -> Any:
    arrays = {
        name: values if isinstance(values, pa.Array) else pa.array(values, _type(name))
        for name, values in columns.items()
    }
    return pa.RecordBatch.from_pydict(arrays)


def _type(name: str) -> Any:
    return stored(name).type


def seal(batch: Any, origin: str = "spark/q/0/0", source: str | None = None, **more: Any) -> list[Envelope]:
    topology = Topology()
    topology.add(Binding("reader", "Do", "command"))
    sealed = BatchSealer(origin, source, topology, **more).seal(batch)
    assert sealed.schema.equals(SCHEMA)
    return to_envelopes(sealed)


def test_two_columns_and_a_source_are_enough() -> None:
    one, two = seal(rows(type=["Noted"] * 2, body=[b"1", b"2"]), source="author")
    assert (one.type, one.kind, one.source, one.body, one.headers) == ("Noted", "event", "author", b"1", {})
    assert one.content_type == "application/json" and one.recipients == () and one.depth == 0
    assert one.correlation_id == one.publication_id != two.publication_id
    assert one.body_digest == sha256(b"1").digest()[:16]
    assert one.sent_at > 1_700_000_000


def test_what_is_given_is_kept() -> None:
    given: dict[str, Any] = {
        "type": "Do",
        "body": b"x",
        "source": "web",
        "destination": "reader",
        "kind": "command",
        "key": "k",
        "headers": {"tenant": "t"},
        "publication_id": "p",
        "correlation_id": "c",
        "causation_id": "d",
        "depth": 4,
        "replay": 1,
        "content_type": "application/msgpack",
        "content_encoding": "gzip",
        "body_digest": b"d" * 16,
        "payload_ref": "r",
        "traceparent": "00-1-2-01",
    }
    times = {"sent_at": 1794733200.5, "deliver_at": 1794733201.0, "expires_at": 1794733202.0}
    stamps = {name: pa.array([int(at * 1e6)], pa.timestamp("us", "Europe/Berlin")) for name, at in times.items()}
    arrays = {name: [list(value.items())] if name == "headers" else [value] for name, value in given.items()}
    [found] = seal(rows(**arrays, **stamps))
    assert set(given) | set(times) == set(WRITABLE)
    for name, value in {**given, **times}.items():
        assert getattr(found, name) == value, name


def test_nulls_get_what_a_missing_column_gets() -> None:
    batch = rows(
        type=["Noted"] * 2,
        body=[b"1", b"2"],
        source=[None, "web"],
        headers=[None, [("a", "b")]],
        depth=[None, 2],
        publication_id=[None, "mine"],
        correlation_id=[None, None],
        content_type=[None, "text/plain"],
        destination=pa.nulls(2, pa.string()),
    )
    one, two = seal(batch, source="author")
    assert (one.source, two.source) == ("author", "web")
    assert (one.headers, two.headers) == ({}, {"a": "b"})
    assert (one.depth, two.depth, one.content_type) == (0, 2, "application/json")
    assert two.publication_id == two.correlation_id == "mine" and one.publication_id == one.correlation_id != ""


def test_bodies_may_be_text() -> None:
    [found] = seal(rows(type=["Noted"], body=pa.array(['{"text":"ä"}'])), source="author")
    assert found.body == '{"text":"ä"}'.encode()


def test_derived_ids_depend_on_where_a_row_stands_and_on_nothing_else() -> None:
    batch = rows(type=["Noted"] * 3, body=[b"1", b"2", b"3"])
    whole = [found.publication_id for found in seal(batch, source="author")]
    assert whole == [found.publication_id for found in seal(batch, source="author")]
    assert len(set(whole)) == 3
    # The same rows in other Arrow batches are the same rows.
    assert [found.publication_id for found in seal(batch.slice(1), source="author", ordinal=1)] == whole[1:]
    assert not set(whole) & {found.publication_id for found in seal(batch, "spark/q/1/0", source="author")}


@pytest.mark.parametrize(
    ("columns", "error", "said"),
    [
        ({"type": ["A", None]}, UnfitValue, "column type is null in 1 rows"),
        ({"body": [None, b""]}, UnfitValue, "column body is null in 1 rows"),
        ({"source": ["a", None]}, UnfitValue, "column source is null in 1 rows, and there is no option source"),
        ({"type": ["A", "B C"]}, InvalidName, "column type: the value 'B C' is not a valid name"),
        ({"source": ["a", "b/c"]}, InvalidName, "column source: the value 'b/c'"),
        ({"kind": ["event", "query"]}, UnfitValue, "column kind is 'query' where it cannot be"),
        ({"kind": ["event", "command"]}, UnfitValue, "a 'command' has a destination"),
        ({"destination": [None, "nobody"]}, Unroutable, "no node 'nobody' handles the command A"),
        ({"headers": [[("a", None)], None]}, UnfitValue, "column headers has a header without a value"),
    ],
)
def test_a_value_that_no_message_can_have_is_refused(
    columns: dict[str, Any], error: type[Exception], said: str
) -> None:
    whole = {"type": ["A", "A"], "body": [b"", b""], "source": ["a", "a"], **columns}
    with pytest.raises(error, match=said.replace("(", r"\(")):
        seal(rows(**whole))


def table(**types: DataType) -> StructType:
    return StructType([StructField(name, type) for name, type in types.items()])


TEXT, BYTES = StringType(), BinaryType()
LEAST = {"type": TEXT, "body": BYTES, "source": TEXT}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"type": TEXT}, "needs the columns type and body to write messages; missing: ['body']"),
        ({"type": TEXT, "body": BYTES}, "who publishes? Give a column source, or option source"),
        ({**LEAST, "total": LongType()}, "cannot write a column 'total'; allowed are ['type'"),
        ({**LEAST, "offset": LongType()}, "'offset'; the log fills it itself: drop it"),
        ({**LEAST, "body": LongType()}, "column body is bigint and must be binary or string: cast it"),
        ({**LEAST, "type": LongType()}, "column type is bigint and must be string"),
        ({**LEAST, "sent_at": TimestampNTZType()}, "column sent_at is timestamp_ntz and must be timestamp"),
        ({**LEAST, "depth": LongType()}, "column depth is bigint and must be int or smallint"),
        ({**LEAST, "headers": MapType(TEXT, LongType())}, "must be map<string,string>"),
    ],
)
def test_columns_that_are_not_those_of_messages_are_refused(columns: dict[str, DataType], said: str) -> None:
    with pytest.raises(UnfitColumns) as caught:
        check_columns(table(**columns), None)
    assert said in str(caught.value)


def test_every_column_that_may_be_written_is_accepted_as_it_is_read() -> None:
    check_columns(table(**{name: COLUMNS[name].dataType for name in WRITABLE}), None)
