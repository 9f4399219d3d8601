"""An envelope says in each field what was said of the message: the fields are filled by their place, for speed."""

from typing import Any

import pytest

import faregate as fg
from faregate.codec import CODECS, BodyWriter
from faregate.core.sealing import Sealer
from faregate.message import describe
from faregate.node.key import read_key


class Placed(fg.Event):
    order_id: str


class Charge(fg.Command):
    order_id: str


MESSAGE = Placed(order_id="17")


def sealer(*, compress_above: int | None = None) -> Sealer:
    writer = BodyWriter(CODECS["msgpack"], limit=1000, compress_above=compress_above)
    return Sealer("shop", writer, {("event", "shop", "Placed"): read_key("order_id", describe(Placed, "event"), "key")})


def sealed(by: Sealer, out: fg.Outgoing) -> dict[str, Any]:
    envelope = by._seal(out, "publication", "correlation", "causation", 3, 100.0)
    return {name: getattr(envelope, name) for name in envelope.__struct_fields__}


@pytest.mark.parametrize("compress_above", [None, 0])
def test_every_field_of_an_event_is_in_its_place(compress_above: int | None) -> None:
    by = sealer(compress_above=compress_above)
    body, encoding, digest = by._writer.write(MESSAGE)
    expected = fg.Envelope(
        publication_id="publication",
        type="Placed",
        kind="event",
        source="shop",
        body=body,
        correlation_id="correlation",
        causation_id="causation",
        depth=3,
        key="17",
        sent_at=100.0,
        deliver_at=105.0,
        expires_at=165.0,
        content_type=CODECS["msgpack"].content_type,
        content_encoding=encoding,
        body_digest=digest,
        headers={"team": "shop"},
        delay=5.0,
    )
    made = sealed(by, fg.publish(MESSAGE, delay=5, expires=60, headers={"team": "shop"}))
    assert made == {name: getattr(expected, name) for name in made}
    assert (encoding is None) == (compress_above is None)


def test_every_field_of_a_command_is_in_its_place() -> None:
    by = sealer()
    body, _, digest = by._writer.write(Charge(order_id="17"))
    expected = fg.Envelope(
        publication_id="publication",
        type="Charge",
        kind="command",
        source="shop",
        body=body,
        destination="payments",
        correlation_id="correlation",
        causation_id="causation",
        depth=3,
        sent_at=100.0,
        deliver_at=200.0,
        content_type=CODECS["msgpack"].content_type,
        body_digest=digest,
    )
    made = sealed(by, fg.send(Charge(order_id="17"), to="payments", at=200.0))
    assert made == {name: getattr(expected, name) for name in made}


def test_an_envelope_does_not_change() -> None:
    envelope = sealer().seal_root(fg.publish(MESSAGE), 100.0)
    with pytest.raises(AttributeError):
        envelope.source = "stranger"  # type: ignore[misc]
