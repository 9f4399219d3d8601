"""An envelope says in each field what was said of the message: the fields are filled by their place, for speed."""

from typing import Any

import pytest

import faregate as fg
from faregate.codec import CODECS, BodyWriter
from faregate.core.sealing import Sealer
from faregate.message import describe
from faregate.node.key import read_key
from faregate.node.outgoing import Alike, as_events


class Placed(fg.Event):
    order_id: str


class Paid(fg.Event):
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


@pytest.mark.parametrize("compress_above", [None, 30])
def test_many_of_one_class_are_sealed_as_each_would_be(compress_above: int | None) -> None:
    by = sealer(compress_above=compress_above)
    messages = [Placed(order_id=order_id) for order_id in ("17", "18", "a much longer name than the others" * 5)]
    together = by.seal_roots(as_events(messages), 100.0)
    assert isinstance(as_events(messages), Alike)
    assert len({envelope.publication_id for envelope in together}) == len(messages)
    assert together == [
        by.seal_root(fg.publish(message), 100.0, envelope.publication_id)
        for message, envelope in zip(messages, together, strict=True)
    ]
    assert [envelope.content_encoding is None for envelope in together] == [True, True, compress_above is None]


def test_events_with_options_or_of_several_classes_are_not_alike() -> None:
    mixed: list[list[Any]] = [[MESSAGE, fg.publish(MESSAGE, delay=1)], [MESSAGE, Paid(order_id="17")], []]
    assert not any(isinstance(as_events(events), Alike) for events in mixed)
    with pytest.raises(fg.UnknownMessage, match="Charge is a command"):
        as_events([Charge(order_id="17")])


def test_one_of_many_that_is_too_large_is_named() -> None:
    with pytest.raises(fg.MessageTooLarge, match="Placed is 10"):
        sealer().seal_roots(as_events([MESSAGE, Placed(order_id="x" * 1000)]), 100.0)
