"""Record batches that are compressed: the same messages, in fewer bytes."""

from faregate.columns import SCHEMA, pack_batch, read_batch, to_batch, write_batch
from faregate.message import Envelope


def test_what_is_packed_is_read_as_what_is_not() -> None:
    envelopes = [
        Envelope(publication_id=f"order-{number}", type="Order", source="shop", body=b"x" * number, headers={"a": "b"})
        for number in range(500)
    ]
    batch = to_batch(envelopes, [-1] * 500, range(500), 0)
    for some in (batch, batch.slice(100, 7), batch.slice(0, 0)):
        packed, plain = pack_batch(some), write_batch(some)
        assert read_batch(memoryview(packed)).equals(read_batch(memoryview(plain))) and some.schema == SCHEMA
    assert len(pack_batch(batch)) < len(write_batch(batch)) / 2
