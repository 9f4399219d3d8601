"""Codecs: message objects to bytes and back, behind one small port.

Rules kept here:
- A codec compiles one function per message class; the hot path never looks a class up.
- What a consumer decodes with is chosen by the envelope's content type, not by its own configuration.
- Nothing from outside is trusted: no pickle, decompression is bounded, every failure is `Undecodable`.
"""

from faregate.codec.body import BodyReader, BodyWriter, digest_of
from faregate.codec.json import JsonCodec
from faregate.codec.msgpack import MsgpackCodec
from faregate.codec.port import Codec, Decode, Encode
from faregate.errors import ConfigurationError

CODECS: dict[str, Codec] = {"json": JsonCodec(), "msgpack": MsgpackCodec()}


def codec(name: str) -> Codec:
    """The codec that a bus was told to write with: "json" or "msgpack"."""
    try:
        return CODECS[name]
    except KeyError:
        raise ConfigurationError(f"there is no codec {name!r}; choose one of {', '.join(CODECS)}") from None


__all__ = [
    "CODECS",
    "BodyReader",
    "BodyWriter",
    "Codec",
    "Decode",
    "Encode",
    "JsonCodec",
    "MsgpackCodec",
    "codec",
    "digest_of",
]
