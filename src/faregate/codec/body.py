"""Bodies of envelopes: encode, compress and bound on the way out; bound, decompress and decode on the way in."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import repeat
from typing import Any

from faregate.codec.compression import GZIP, compress, decompress, unpacked
from faregate.codec.port import Codec, Decode, Encode
from faregate.codec.registry import CODECS, content_types, registered
from faregate.errors import MessageTooLarge, Undecodable
from faregate.message import Envelope

Body = tuple[bytes, str | None, bytes | None]
"""An encoded message: its bytes, how they were compressed, and the digest of the plain bytes, where that is wanted."""


class BodyWriter:
    """Encodes with one codec; one function per class is kept."""

    def __init__(self, codec: Codec, *, limit: int, compress_above: int | None = None, digests: bool = True) -> None:
        self.content_type = codec.content_type
        self._codec = codec
        self.limit = limit
        self._compress_above = limit if compress_above is None else min(limit, compress_above)
        self._digests = digests
        self._encoders: dict[type, Encode] = {}

    def write(self, message: Any) -> Body:
        """Raises `MessageTooLarge`, or the codec's `TypeError` for a value that it cannot encode."""
        cls = type(message)
        encode = self._encoders.get(cls)
        if encode is None:
            encode = self._encoders[cls] = self._codec.encoder(cls)
        plain = encode(message)
        digest = sha256(plain).digest()[:16] if self._digests else None
        if len(plain) <= self._compress_above:
            return plain, None, digest
        if len(plain) > self.limit:
            raise MessageTooLarge(
                f"{cls.__name__} is {len(plain)} bytes when encoded and the limit is {self.limit}: "
                "send a reference to the data instead, or raise max_message_bytes of the bus"
            )
        return compress(plain), GZIP, digest

    def write_all(self, messages: Sequence[Any]) -> Iterable[Body]:
        """The same for some of one class."""
        cls = type(messages[0])
        encode = self._encoders.get(cls) or self._encoders.setdefault(cls, self._codec.encoder(cls))
        plains = list(map(encode, messages))
        if max(map(len, plains)) > self._compress_above:
            return map(self.write, messages)
        count = len(plains)
        digests = [sha256(plain).digest()[:16] for plain in plains] if self._digests else repeat(None, count)
        return zip(plains, repeat(None, count), digests, strict=True)


def digest_of(envelope: Envelope) -> bytes | None:
    """The digest of a body that came without one; None where that would mean to decompress it."""
    return None if envelope.content_encoding is not None else sha256(envelope.body).digest()[:16]


def is_altered(body: bytes, encoding: str | None, digest: bytes) -> bool:
    """Whether a body, as it travels, is another one than the digest was made of: also one that cannot be unpacked. Of
    an encoding that is not known nothing can be said."""
    if encoding is None:
        return sha256(body).digest()[: len(digest)] != digest
    if encoding != GZIP:
        return False
    plain = sha256()
    try:
        for piece in unpacked(body, encoding):
            plain.update(piece)
    except Undecodable:
        return True
    return plain.digest()[: len(digest)] != digest


class BodyReader:
    """Decodes bodies into one class, whatever codec the publisher chose."""

    def __init__(self, cls: type, *, limit: int, part: type | None = None) -> None:
        """`part`: a class with some fields of `cls`; codecs of which we know that they read any class read that."""
        self._cls = cls
        self._limit = limit
        self._decoders: dict[str, Decode] = {
            codec.content_type: codec.decoder(part or cls) for codec in CODECS.values()
        }

    def decoder(self, content_type: str) -> Decode:
        """The bare function behind one content type, for who checks the rest for many bodies at once.

        Raises `Undecodable` when there is none.
        """
        if content_type not in self._decoders:
            codec = registered(content_type)
            if codec is None:
                raise Undecodable(
                    f"the content type {content_type!r} is not known; known are {', '.join(content_types())}. A codec "
                    "for it is registered with fg.register_codec(…), in a module that this process imports"
                )
            try:
                self._decoders[content_type] = codec.decoder(self._cls)
            except Exception as exc:
                raise Undecodable(f"{content_type} cannot be read as a {self._cls.__name__}: {exc}") from exc
        return self._decoders[content_type]

    def read(self, envelope: Envelope) -> Any:
        """The message. Raises `Undecodable`, which names what is wrong with it."""
        body = envelope.body
        if envelope.content_encoding is not None:
            body = decompress(body, envelope.content_encoding, self._limit)
        elif len(body) > self._limit:
            raise Undecodable(f"the body is {len(body)} bytes, over the limit of {self._limit}")
        decode = self._decoders.get(envelope.content_type) or self.decoder(envelope.content_type)
        try:
            return decode(body)
        except MemoryError:
            raise
        except Exception as exc:  # a codec may be somebody else's: nothing that it raises may harm a queue
            raise Undecodable(f"the body is not a {self._cls.__name__}: {exc}") from exc
