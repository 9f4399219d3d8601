"""A codec of one's own, and a node that speaks it. Spark's workers import this."""

import faregate as fg
from faregate.codec import Decode, Encode, JsonCodec


class MirrorCodec:
    """JSON from right to left. Like generated classes it knows only messages that were declared for it."""

    content_type = "application/vnd.mirror+json"

    def encoder(self, cls: type) -> Encode:
        self._check(cls)
        encode = JsonCodec().encoder(cls)
        return lambda message: encode(message)[::-1]

    def decoder(self, cls: type) -> Decode:
        self._check(cls)
        decode = JsonCodec().decoder(cls)
        return lambda body: decode(_turned(body))

    def _check(self, cls: type) -> None:
        if cls not in (Asked, Answered):
            raise LookupError(f"{cls.__name__} has no mirror")


def _turned(body: bytes) -> bytes:
    if not body.endswith(b"{"):
        raise EOFError("this is no mirror image")  # not a ValueError
    return body[::-1]


class Asked(fg.Event):
    who: str
    number: int


class Answered(fg.Event):
    who: str
    number: int


fg.register_codec(MirrorCodec())

asking = fg.Node("asking")
answering = fg.Node("answering", schema="create table if not exists asked(who text, number integer)")
plain_answering = fg.Node("answering")


@answering.on(Asked, source="asking", key="who")
async def answer(asked: Asked, ctx: fg.Context) -> Answered:
    await ctx.db.execute("insert into asked values (?, ?)", (ctx.key, asked.number))
    return Answered(who=asked.who, number=asked.number)


@plain_answering.on(Asked, source="asking")
def echo(asked: Asked) -> Answered:
    return Answered(who=asked.who, number=asked.number)
