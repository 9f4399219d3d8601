"""What every codec promises, as cases that take a codec: `for name, case in CODEC_CASES.items(): case(codec)`.

A case raises AssertionError when the promise is broken.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from uuid import UUID

from faregate.codec import Codec
from faregate.message import Event
from faregate.testing.cases import Cases, refused

CODEC_CASES = Cases[Codec]()
case = CODEC_CASES.add


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Line:
    sku: str
    count: int


class Sample(Event, wire="codec-sample"):
    text: str
    number: int
    share: float
    flag: bool
    nothing: str | None
    raw: bytes
    lines: list[Line]
    by_name: dict[str, int]
    colour: Colour
    when: datetime
    identity: UUID
    price: Decimal


class Fewer(Event, wire="codec-sample"):
    text: str
    added_later: int = 7


SAMPLE = Sample(
    text='naïve ☃ \U0001f680 "quoted" \\ \x00',
    number=-(2**53),
    share=0.1,
    flag=True,
    nothing=None,
    raw=bytes(range(256)),
    lines=[Line("a", 1), Line("b", 2)],
    by_name={"x": 1, "ü": 2},
    colour=Colour.RED,
    when=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
    identity=UUID(int=2**127 + 5),
    price=Decimal("12.340"),
)


@case
def a_message_comes_back_equal(codec: Codec) -> None:
    body = codec.encoder(Sample)(SAMPLE)
    assert isinstance(body, bytes), f"encoded to {type(body).__name__}, not bytes"
    back = codec.decoder(Sample)(body)
    assert back == SAMPLE, f"{back} is not {SAMPLE}"
    assert type(back) is Sample, f"decoded to {type(back).__name__}"


@case
def encoding_twice_gives_the_same_bytes(codec: Codec) -> None:
    encode = codec.encoder(Sample)
    assert encode(SAMPLE) == encode(SAMPLE), "the body digest would differ between two executions"


@case
def a_consumer_with_fewer_fields_reads_it(codec: Codec) -> None:
    back = _read_fewer(codec)
    assert back == Fewer(text=SAMPLE.text), f"a tolerant reader got {back}"


@case
def a_consumer_with_a_new_default_reads_old_messages(codec: Codec) -> None:
    back = _read_fewer(codec)
    assert back.added_later == 7, "the default of a field that was added later is not used"


@case
def garbage_is_a_value_error(codec: Codec) -> None:
    decode = codec.decoder(Sample)
    good = codec.encoder(Sample)(SAMPLE)
    for body in (b"", b"\xff\xfe\xc1", b"not a message", good[:-5], b"[1]", good + b"\x00}"):
        with refused(ValueError, f"{body[:20]!r} was read"):
            decode(body)


@case
def a_wrong_type_is_a_value_error(codec: Codec) -> None:
    with refused(ValueError, "a message was read that lacks fields"):
        codec.decoder(Sample)(codec.encoder(Fewer)(Fewer(text="only this")))


def _read_fewer(codec: Codec) -> Fewer:
    try:
        back: Fewer = codec.decoder(Fewer)(codec.encoder(Sample)(SAMPLE))
    except ValueError as exc:
        raise AssertionError(f"a consumer that declares fewer fields cannot read it: {exc}") from exc
    return back
