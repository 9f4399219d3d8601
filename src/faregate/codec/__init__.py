"""Codecs: message objects to bytes and back, behind one small port.

Rules kept here:
- A codec compiles one function per message class; the hot path never looks a class up.
- What a consumer decodes with is chosen by the envelope's content type, not by its own configuration.
- Nothing from outside is trusted: no pickle, decompression is bounded, every failure is `Undecodable`.
"""

from faregate.codec.body import BodyReader, BodyWriter, digest_of, is_altered
from faregate.codec.formats import JsonCodec, MsgpackCodec
from faregate.codec.port import Codec, Decode, Encode
from faregate.codec.registry import CODECS, find_codec, register_codec

__all__ = [
    "CODECS",
    "BodyReader",
    "BodyWriter",
    "Codec",
    "Decode",
    "Encode",
    "JsonCodec",
    "MsgpackCodec",
    "digest_of",
    "find_codec",
    "is_altered",
    "register_codec",
]
