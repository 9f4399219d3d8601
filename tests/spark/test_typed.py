"""Messages as typed rows: which column each type has, and rows for what cannot be decoded. Without a session."""

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import pyarrow as pa
import pytest
from pydantic import BaseModel

import faregate as fg
from faregate.codec import CODECS, BodyWriter
from faregate.columns import to_batch
from faregate.errors import ConfigurationError
from faregate.message import Envelope
from faregate.spark.typed.decode import Decoder, TypedSpec, schema_of
from faregate.spark.typed.plan import plan_of
from faregate.spark.typed.travel import Named, Traveller, pack_class
from tests.spark import typed_messages as messages
from tests.spark.typed_messages import VALUES, Everything, Line, Placed

LIMIT = 100_000


def rows_of(cls: type, envelopes: Sequence[Envelope], traveller: Traveller | None = None) -> list[dict[str, Any]]:
    spec = TypedSpec(traveller or pack_class(cls), cls.__name__, schema_of(cls), LIMIT)
    batch = to_batch(envelopes, [-1] * len(envelopes), range(len(envelopes)), 1_000_000)
    return pa.Table.from_batches([Decoder(spec).rows(batch)]).to_pylist(maps_as_pydicts="strict")  # type: ignore[no-any-return]


def envelope_of(message: Any, codec: Any = "json", compress_above: int | None = None) -> Envelope:
    writer = BodyWriter(CODECS.get(codec, codec), limit=LIMIT, compress_above=compress_above)
    body, encoding, digest = writer.write(message)
    return Envelope("p", body=body, content_encoding=encoding, content_type=writer.content_type, body_digest=digest)


def json_of(*bodies: str) -> list[Envelope]:
    return [Envelope(f"p{number}", body=body.encode()) for number, body in enumerate(bodies)]


def reasons(rows: Iterable[dict[str, Any]]) -> list[str | None]:
    return [None if row["_error"] is None else row["_error"]["reason"] for row in rows]


LINE = {"sku": "a", "count": 1, "price": None}
EXPECTED = {
    "text": ("string", "naïve"),
    "whole": ("bigint", 2**62),
    "real": ("double", 1.5),
    "flag": ("boolean", True),
    "raw": ("binary", b"\x00\xff"),
    "moment": ("timestamp", datetime(2026, 11, 17, 8, 0, 0, 123456, tzinfo=UTC)),
    "local": ("timestamp_ntz", datetime(2026, 11, 17, 10)),
    "day": ("date", date(2026, 11, 17)),
    "hour": ("string", "10:30:00"),
    "wait": ("interval day to second", timedelta(days=1, microseconds=5)),
    "id": ("string", "00000000-0000-0000-0000-000000000011"),
    "price": ("decimal(38,18)", Decimal("12.34")),
    "color": ("string", "blue"),
    "level": ("bigint", 2),
    "size": ("string", "m"),
    "lines": (
        "array<struct<sku:string,count:bigint,price:decimal(38,18)>>",
        [{"sku": "a", "count": 2, "price": Decimal("0.5")}, {"sku": "b", "count": 1, "price": None}],
    ),
    "tags": ("array<string>", ["new"]),
    "pair": ("struct<_1:bigint,_2:string>", {"_1": 1, "_2": "one"}),
    "many": ("array<bigint>", [1, 2, 3]),
    "by_name": ("map<string,struct<sku:string,count:bigint,price:decimal(38,18)>>", {"a": LINE}),
    "by_id": ("map<string,bigint>", {"00000000-0000-0000-0000-000000000001": 1}),
    "corner": ("struct<x:bigint,y:double>", {"x": 1, "y": 2.5}),
    "extra": ("struct<note:string>", {"note": "hello"}),
    "first": ("struct<sku:string,count:bigint,price:decimal(38,18)>", {**LINE, "sku": "first"}),
    "number": ("double", 3.0),
    "mixed": ("string", '"text"'),
    "anything": ("string", '{"a":[1,null]}'),
    "tree": ("struct<name:string,below:array<string>>", {"name": "root", "below": ['{"name":"leaf","below":[]}']}),
    "maybe": ("string", None),
    "maybe_line": ("struct<sku:string,count:bigint,price:decimal(38,18)>", {**LINE, "sku": "maybe"}),
    "unset": ("bigint", None),
    "renamed": ("bigint", 5),
}


def test_every_type_has_its_column() -> None:
    fields = schema_of(Everything).fields[:-2]
    assert {each.name: each.dataType.simpleString() for each in fields} == {
        name: type for name, (type, _) in EXPECTED.items()
    }


@pytest.mark.parametrize("compress_above", [None, 10])
@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_values_of_every_codec_are_read_alike(codec: str, compress_above: int | None) -> None:
    [row] = rows_of(Everything, [envelope_of(VALUES, codec, compress_above)])
    assert row.pop("_error") is None
    assert row.pop("_message")["publication_id"] == "p"
    assert row == {name: value for name, (_, value) in EXPECTED.items()}


def test_codecs_in_one_batch_are_told_apart_message_by_message() -> None:
    message = messages.Reversed("abc")
    found = rows_of(messages.Reversed, [envelope_of(message, codec) for codec in ("json", messages.ReversedCodec())])
    assert [row["text"] for row in found] == ["abc", "abc"]


def test_missing_fields_have_their_defaults_and_unknown_ones_are_passed_over() -> None:
    old, new = json_of(
        '{"order_id":"1","total":2,"coupon":"no longer"}',
        '{"order_id":"2","total":3,"currency":"CHF","lines":[{"sku":"a","colour":1}],"placed_by":{"sku":"me"}}',
    )
    first, second = rows_of(Placed, [old, new])
    assert reasons([first, second]) == [None, None]
    assert (first["currency"], first["lines"], first["placed_by"]["sku"]) == ("EUR", [], "nobody")
    assert (second["currency"], second["lines"], second["placed_by"]["sku"]) == ("CHF", [LINE], "me")


def test_what_cannot_be_decoded_is_a_row_with_the_reason_and_the_body() -> None:
    good = '{"order_id":"1","total":2}'
    odd = [
        "not json",
        '{"order_id":"1"}',
        '{"order_id":1,"total":2}',
        '{"order_id":"1","total":9223372036854775808}',
        '{"order_id":"1","total":2,"lines":[{"sku":"a","price":"1e30"}]}',
    ]
    envelopes = [
        *json_of(good, *odd),
        Envelope("p", body=b"1", content_type="application/x-strange"),
        Envelope("p", body=b"1", content_encoding="zstd"),
        Envelope("p", body=good.encode(), payload_ref="s3://elsewhere"),
        Envelope("p", body=b"x" * (LIMIT + 1)),
        *json_of(good),
    ]
    found = rows_of(Placed, envelopes)
    told = reasons(found)
    assert told[0] is None and told[-1] is None and None not in told[1:-1]
    assert [row["total"] for row in found] == [2, *[None] * 9, 2]
    assert [row["_message"]["offset"] for row in found] == list(range(11))
    words = ["JSON", "total", "str", "total", "lines", "x-strange", "zstd", "s3://elsewhere", "over the limit"]
    assert [word for word, text in zip(words, told[1:-1], strict=True) if word not in (text or "")] == []
    assert [row["_error"]["body"] for row in found[1:6]] == [each.encode() for each in odd]
    assert (found[6]["_error"]["content_type"], found[7]["_error"]["content_encoding"]) == (
        "application/x-strange",
        "zstd",
    )


class Moment(fg.Event):
    at: datetime
    price: Decimal = Decimal(0)


def test_a_value_that_a_column_cannot_hold_is_told_with_its_field() -> None:
    bodies = [
        '{"at":"0001-01-01T00:00:00+14:00"}',
        '{"at":"9999-12-31T23:59:59-14:00"}',
        '{"at":"2026-11-19T00:00:00Z","price":"123456789012345678901"}',
        '{"at":"2026-11-19T02:00:00+02:00"}',
    ]
    *bad, good = rows_of(Moment, json_of(*bodies))
    assert [reason is not None and reason.partition(":")[0] for reason in reasons(bad)] == [
        "at does not fit its column, timestamp",
        "at does not fit its column, timestamp",
        "price does not fit its column, decimal(38,18)",
    ]
    assert "123456789012345678901" in (reasons(bad)[2] or "")
    assert good["at"] == datetime(2026, 11, 19, tzinfo=UTC) and good["_error"] is None


class Shy(msgspec.Struct):
    price: Decimal

    def __repr__(self) -> str:
        raise RuntimeError("not now")


class Bought(fg.Event):
    line: Shy


def test_a_value_that_shows_itself_to_nobody_fails_no_query() -> None:
    rows = rows_of(Bought, json_of('{"line":{"price":"123456789012345678901"}}', '{"line":{"price":"1"}}'))
    assert (reasons(rows)[0] or "").endswith(": its value cannot be shown (RuntimeError)")
    assert rows[1]["line"] == {"price": Decimal(1)} and rows[1]["_error"] is None


class Mixture(enum.Enum):
    TEXT, NUMBER = "A", 3


class Mixing(fg.Event):
    plain: str
    mixtures: list[Mixture]


def test_a_field_that_has_no_type_for_a_body_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"^Mixing\.mixtures cannot be read as Spark columns: Enums"):
        schema_of(Mixing)


class Torn(msgspec.Struct):
    part: "Nowhere"  # type: ignore[name-defined]  # noqa: F821


class Tearing(fg.Event):
    torn: Torn


def test_a_field_whose_class_is_nowhere_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"^Tearing\.torn cannot be read as Spark columns: .*'Nowhere'"):
        schema_of(Tearing)


def test_a_reason_is_one_printable_line() -> None:
    [row] = rows_of(Placed, [Envelope("p", body=b"1", content_type="a\nb")])
    assert "a\\nb" in row["_error"]["reason"].replace("\\\\", "\\") and "\n" not in row["_error"]["reason"]


def test_a_batch_of_nothing_but_errors() -> None:
    [row] = rows_of(Placed, json_of("no"))
    assert row["order_id"] is None and row["_error"]["body"] == b"no"


def test_the_envelope_stands_beside_the_fields() -> None:
    envelope = Envelope(
        "p",
        source="shop",
        body=b'{"order_id":"1","total":2}',
        correlation_id="c",
        causation_id="before",
        key="1",
        sent_at=2.5,
        headers={"a": "b"},
    )
    [row] = rows_of(Placed, [envelope])
    assert row["_message"] == {
        "offset": 0,
        "appended_at": datetime.fromtimestamp(1, UTC),
        "sent_at": datetime.fromtimestamp(2.5, UTC),
        "publication_id": "p",
        "source": "shop",
        "key": "1",
        "correlation_id": "c",
        "causation_id": "before",
        "headers": {"a": "b"},
    }


@pytest.mark.parametrize("cls", [messages.Model, messages.Data, messages.Attributes])
def test_pydantic_models_dataclasses_and_attrs_classes(cls: type) -> None:
    good = '{"order_id":"1","total":"2.5","lines":[{"sku":"a"}],"rest":{"a":[{"sku":"b"}]}}'
    first, second = rows_of(cls, json_of(good, "[]"))
    assert reasons([first]) == [None]
    assert (first["order_id"], first["color"]) == ("1", "red")
    assert second["order_id"] is None and second["_error"] is not None
    if cls is messages.Model:
        assert (first["total"], first["lines"], first["rest"]) == (
            Decimal("2.5"),
            [{"sku": "a"}],
            {"a": '[{"sku":"b"}]'},
        )


class Custom:
    pass


class WithCustom(fg.Event):
    inner: list[Custom]


class WithError(fg.Event):
    _Error: str


class WithRaw(fg.Event):
    raw: msgspec.Raw


class Cased(msgspec.Struct):
    sku: str
    SKU: str


class WithCases(fg.Event):
    parts: list[Cased]


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (WithCases, ["WithCases.parts[].sku", "WithCases.parts[].SKU", "only in case"]),
        (WithCustom, ["WithCustom.inner[]", "Custom", 'wire="OrderPlaced"']),
        (WithRaw, ["WithRaw.raw", "Raw"]),
        (WithError, ["_Error", "msgspec.field(name=…)"]),
    ],
)
def test_what_cannot_be_a_column_is_refused_with_the_name_of_the_field(cls: type, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        schema_of(cls)
    assert [word for word in words if word not in str(caught.value)] == []


# --- classes that no module holds ----------------------------------------------------------------------------------


def test_a_class_of_a_module_goes_by_its_name() -> None:
    named = pack_class(Everything)
    assert isinstance(named, Named) and named[:2] == ("tests.spark.typed_messages", "Everything")


def test_a_class_that_no_module_holds_is_made_again_and_reads_the_same() -> None:
    from pyspark import cloudpickle

    plan = plan_of(messages.Placed)
    again = cloudpickle.loads(cloudpickle.dumps(plan))
    bodies = json_of('{"order_id":"1","total":2,"more":1}', '{"order_id":"1","total":"2"}', '{"total":1}')
    assert rows_of(Placed, bodies, again) == rows_of(Placed, bodies)


@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_every_type_is_made_again(codec: str) -> None:
    fields = [each for each in msgspec.structs.fields(Everything) if each.name != "tree"]
    cls = msgspec.defstruct("Most", [(each.name, each.type) for each in fields if each.required], frozen=True)
    value = cls(**{name: getattr(VALUES, name) for name in cls.__struct_fields__})
    envelope = envelope_of(value, codec)
    [row] = rows_of(cls, [envelope], plan_of(cls))
    assert {name: row[name] for name in cls.__struct_fields__} == {
        name: EXPECTED[name][1] for name in cls.__struct_fields__
    }


def test_limits_of_fields_hold_in_a_class_that_is_made_again() -> None:
    class Limited(msgspec.Struct, forbid_unknown_fields=True):
        count: Annotated[int, msgspec.Meta(gt=0)]
        names: Annotated[list[str], msgspec.Meta(max_length=1)] = msgspec.field(default_factory=lambda: ["x"])

    bodies = json_of('{"count":1}', '{"count":0}', '{"count":1,"names":["a","b"]}', '{"count":1,"other":1}')
    told = reasons(rows_of(Limited, bodies))
    assert [text is None for text in told] == [True, False, False, False]
    assert rows_of(Limited, bodies)[0]["names"] == ["x"]


def _local_classes() -> list[tuple[type, str]]:
    class Checked(msgspec.Struct):
        count: int

        def __post_init__(self) -> None:
            pass

    @dataclasses.dataclass
    class CheckedData:
        line: Checked

    class LocalModel(BaseModel):
        count: int

    return [(Checked, "Checked"), (CheckedData, "CheckedData.line"), (LocalModel, "LocalModel")]


@pytest.mark.parametrize(("cls", "name"), _local_classes())
def test_a_class_that_needs_its_own_code_has_to_be_in_a_module(cls: type, name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name}: no module holds this class.*Put it into a module"):
        pack_class(cls)


def test_a_worker_with_another_version_of_the_class_says_so() -> None:
    spec = TypedSpec(pack_class(Line), "Line", schema_of(Placed), LIMIT)
    with pytest.raises(ConfigurationError, match="install the same version"):
        Decoder(spec)
