"""Encode and decode a typical message with the JSON and MessagePack codecs, beside orjson and the stdlib.

Ours goes from an `fg.Event` to bytes and back to a checked `fg.Event`. The peers get three set-ups, from the least to
the most work; only the first, which is the easiest for them, decides about the targets:

    dict            a plain dict to bytes and back to a dict: no class, nothing checked.
    dataclass       a dataclass to bytes and back to one: types are not checked.
    pydantic        a dataclass to bytes with orjson, and back through a pydantic model that checks (orjson only).

"body" is what the bus adds on top: the size limit and the SHA-256 digest of each body, and the choice of the decoder.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

from _harness import Contestant, Report, Run, interleave, options
from msgspec.structs import force_setattr
from pydantic import BaseModel

import faregate as fg
from faregate.codec import CODECS, BodyReader, BodyWriter
from faregate.message import Envelope

FIELDS: dict[str, Any] = {
    "order_id": "0197a3c2-7d0b-7c55-8a51-1f2e3d4c5b6a",
    "customer": "customer-000042",
    "currency": "EUR",
    "total": 129_900,
    "weight": 2.75,
    "express": True,
    "tags": ["gift", "fragile"],
    "note": "leave it with Frau Müller next door",
}
LIMIT = 1024 * 1024
TARGET = 2.0


class OrderPlaced(fg.Event):
    order_id: str
    customer: str
    currency: str
    total: int
    weight: float
    express: bool
    tags: list[str]
    note: str


@dataclasses.dataclass(slots=True)
class OrderData:
    order_id: str
    customer: str
    currency: str
    total: int
    weight: float
    express: bool
    tags: list[str]
    note: str


class OrderModel(BaseModel):
    order_id: str
    customer: str
    currency: str
    total: int
    weight: float
    express: bool
    tags: list[str]
    note: str


def stdlib_dump(data: OrderData) -> str:
    names = OrderData.__slots__
    return json.dumps({name: getattr(data, name) for name in names})


def pair(encode: Callable[[Any], Any], decode: Callable[[Any], Any], message: Any) -> Run:
    """Times encode + decode, after a check that what comes back is what went in."""
    assert decode(encode(message)) == message

    async def run(messages: int) -> float:
        begin = time.perf_counter()
        for _ in range(messages):
            decode(encode(message))
        return time.perf_counter() - begin

    return run


def body_pair(name: str) -> Run:
    """The codec as the bus uses it: through the writer and the reader of bodies."""
    write = BodyWriter(CODECS[name], limit=LIMIT).write
    read = BodyReader(OrderPlaced, limit=LIMIT).read
    envelope = Envelope(content_type=CODECS[name].content_type)

    def encode(message: Any) -> Envelope:
        force_setattr(envelope, "body", write(message)[0])
        return envelope

    return pair(encode, read, OrderPlaced(**FIELDS))


def orjson_pairs(data: OrderData) -> dict[str, Run]:
    import orjson

    model = OrderModel.model_validate
    return {
        "orjson_dict": pair(orjson.dumps, orjson.loads, FIELDS),
        "orjson_dataclass": pair(orjson.dumps, lambda raw: OrderData(**orjson.loads(raw)), data),
        "orjson_pydantic": pair(
            lambda order: orjson.dumps(order.__dict__), lambda raw: model(orjson.loads(raw)), OrderModel(**FIELDS)
        ),
    }


def main() -> None:
    args = options(__doc__, rounds=11, messages=20_000)
    report = Report("codec", args.json)
    event, data = OrderPlaced(**FIELDS), OrderData(**FIELDS)
    codecs = {name: (codec.encoder(OrderPlaced), codec.decoder(OrderPlaced)) for name, codec in CODECS.items()}
    ours = {
        **{name: pair(encode, decode, event) for name, (encode, decode) in codecs.items()},
        **{f"{name}_body": body_pair(name) for name in codecs},
    }
    peers = {
        "stdlib_dict": pair(json.dumps, json.loads, FIELDS),
        "stdlib_dataclass": pair(stdlib_dump, lambda text: OrderData(**json.loads(text)), data),
    }
    if report.has_peer("orjson"):
        peers |= orjson_pairs(data)
    contestants = [Contestant(name, run) for name, run in (ours | peers).items()]
    samples = interleave(contestants, rounds=args.rounds, messages=args.messages)

    sizes = {name: len(encode(event)) for name, (encode, _) in codecs.items()}
    report.say("a message is " + ", ".join(f"{size} bytes of {name}" for name, size in sizes.items()))
    rows = [
        (
            name,
            f"{samples.cost(name) * 1e6:.3f}",
            f"{samples.rate(name):,.0f}",
            f"{samples.ratio('json', name):.2f}",
            f"{samples.ratio('msgpack', name):.2f}",
        )
        for name in samples.seconds
    ]
    report.table(("encode + decode", "µs", "messages/s", "json is x faster", "msgpack is x faster"), rows)
    report.ours = {f"{name}_us": samples.cost(name) * 1e6 for name in ours}
    report.ours |= {f"{name}_bytes": size for name, size in sizes.items()}
    report.peers = {f"{name}_us": samples.cost(name) * 1e6 for name in peers}
    for name in codecs:
        report.goal(f"{name}_to_stdlib", samples.ratio(name, "stdlib_dict"), TARGET)
    report.finish()


if __name__ == "__main__":
    main()
