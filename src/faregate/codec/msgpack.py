"""MessagePack: the same data model as JSON in fewer bytes."""

from typing import Any

import msgspec

from faregate.codec.port import Decode, Encode, is_pydantic

_encode = msgspec.msgpack.Encoder().encode


class MsgpackCodec:
    content_type = "application/msgpack"

    def encoder(self, cls: type) -> Encode:
        if is_pydantic(cls):
            return _encode_pydantic
        return _encode

    def decoder(self, cls: type) -> Decode:
        if is_pydantic(cls):
            validate = cls.model_validate  # type: ignore[attr-defined]
            return lambda body: validate(msgspec.msgpack.decode(body))
        return msgspec.msgpack.Decoder(cls).decode


def _encode_pydantic(message: Any) -> bytes:
    return _encode(message.model_dump(mode="json"))
