"""JSON, the default: readable by people, by other languages and by Spark."""

from typing import Any

import msgspec

from faregate.codec.port import Decode, Encode, is_pydantic

_encode = msgspec.json.Encoder().encode


class JsonCodec:
    content_type = "application/json"

    def encoder(self, cls: type) -> Encode:
        if is_pydantic(cls):
            return _encode_pydantic
        return _encode

    def decoder(self, cls: type) -> Decode:
        if is_pydantic(cls):
            return cls.model_validate_json  # type: ignore[attr-defined, no-any-return]
        return msgspec.json.Decoder(cls).decode


def _encode_pydantic(message: Any) -> bytes:
    text: str = message.model_dump_json()
    return text.encode()
