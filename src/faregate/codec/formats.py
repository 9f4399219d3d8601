"""The formats that are always there: JSON, the default, which people, other languages and Spark can read; and
MessagePack, the same data model in fewer bytes.

Pydantic models bring their own validation. They are recognised by their shape, so that pydantic is not imported.
"""

from typing import Any

import msgspec

from faregate.codec.port import Decode, Encode

_encode_json, _encode_msgpack = msgspec.json.Encoder().encode, msgspec.msgpack.Encoder().encode


class JsonCodec:
    content_type = "application/json"

    def encoder(self, cls: type) -> Encode:
        return _encode_pydantic_json if is_pydantic(cls) else _encode_json

    def decoder(self, cls: type) -> Decode:
        if is_pydantic(cls):
            return cls.model_validate_json  # type: ignore[attr-defined, no-any-return]
        return msgspec.json.Decoder(cls).decode


class MsgpackCodec:
    content_type = "application/msgpack"

    def encoder(self, cls: type) -> Encode:
        return _encode_pydantic_msgpack if is_pydantic(cls) else _encode_msgpack

    def decoder(self, cls: type) -> Decode:
        if is_pydantic(cls):
            validate = cls.model_validate  # type: ignore[attr-defined]
            return lambda body: validate(msgspec.msgpack.decode(body))
        return msgspec.msgpack.Decoder(cls).decode


def is_pydantic(cls: type) -> bool:
    """Pydantic is not imported for this."""
    return hasattr(cls, "model_validate_json") and hasattr(cls, "model_dump")


def _encode_pydantic_json(message: Any) -> bytes:
    text: str = message.model_dump_json()
    return text.encode()


def _encode_pydantic_msgpack(message: Any) -> bytes:
    return _encode_msgpack(message.model_dump(mode="json"))
