"""The codecs of this process, by the content type that they write and read.

A reader looks a content type up when a message with it comes, so it does not matter whether a codec or a subscription
was there first. Spark's workers have the codecs that the node's module registers when they import it.
"""

from faregate.codec.formats import JsonCodec, MsgpackCodec
from faregate.codec.port import Codec
from faregate.errors import ConfigurationError

CODECS: dict[str, Codec] = {"json": JsonCodec(), "msgpack": MsgpackCodec()}
"""Those that are always there, by name."""

_registered: dict[str, Codec] = {}


def register_codec(codec: Codec) -> None:
    """Have every bus, and every run on Spark, of this process read what this codec writes.

    Codecs are told apart by their content type: another one for the same type raises `ConfigurationError`, an instance
    of the same class takes its place.
    """
    content_type = getattr(codec, "content_type", None)
    if not isinstance(content_type, str) or not content_type or not content_type.isprintable():
        raise ConfigurationError(f"a codec has a content_type, such as 'application/avro'; {codec!r} has none")
    if isinstance(codec, type) or not all(callable(getattr(codec, name, None)) for name in ("encoder", "decoder")):
        raise ConfigurationError(f"a codec is an object with encoder(cls) and decoder(cls); got {codec!r}")
    known = registered(content_type)
    if known is not None and type(known) is not type(codec):
        raise ConfigurationError(
            f"{content_type} is read by {type(known).__name__} already: give {type(codec).__name__} a content type of "
            "its own, such as application/vnd.shop+json"
        )
    _registered[content_type] = codec


def registered(content_type: str) -> Codec | None:
    """The codec of a content type."""
    always = next((codec for codec in CODECS.values() if codec.content_type == content_type), None)
    return always or _registered.get(content_type)


def content_types() -> list[str]:
    return [*(codec.content_type for codec in CODECS.values()), *_registered]


def find_codec(codec: str | Codec) -> Codec:
    """What a bus was told to write with: "json", "msgpack", a registered content type, or a codec, which it registers.

    Raises `ConfigurationError`.
    """
    if not isinstance(codec, str):
        register_codec(codec)
        return codec
    found = CODECS.get(codec) or registered(codec)
    if found is None:
        raise ConfigurationError(
            f"there is no codec {codec!r}; choose one of {', '.join([*CODECS, *_registered])}, or register yours with "
            "fg.register_codec(…), for Spark in the module of the node"
        )
    return found
