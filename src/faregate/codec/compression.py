"""Compression of bodies, with a bound on what a body may grow to when it is read."""

import zlib
from collections.abc import Iterator

from faregate.errors import Undecodable

GZIP = "gzip"
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_PIECE = 1 << 20


def compress(body: bytes) -> bytes:
    """gzip at the fastest level: messages are small and latency matters more than the last percent."""
    packer = zlib.compressobj(1, zlib.DEFLATED, _GZIP_WINDOW)
    return packer.compress(body) + packer.flush()


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """The plain body. Raises `Undecodable` beyond `limit` bytes without ever holding more than that."""
    if encoding != GZIP:
        raise Undecodable(f"the content encoding {encoding!r} is not known; known is '{GZIP}'")
    pieces = unpacked(body, encoding, limit + 1)
    plain = next(pieces)
    if len(plain) > limit:
        raise Undecodable(f"the body is over {limit} bytes when decompressed")
    return b"".join((plain, *pieces))  # a first piece that is not full is all: behind it comes only the end


def unpacked(body: bytes, encoding: str | None, most: int = _PIECE) -> Iterator[bytes]:
    """The plain body in pieces, however large it is; of no encoding, or gzip. Raises `Undecodable`."""
    if encoding is None:
        yield body
        return
    unpacker = zlib.decompressobj(_GZIP_WINDOW)
    left = body
    while not unpacker.eof:
        try:
            piece = unpacker.decompress(left, most)
        except zlib.error as exc:
            raise Undecodable(f"the body is not valid gzip: {exc}") from exc
        left = unpacker.unconsumed_tail
        if not piece and not left and not unpacker.eof:
            raise Undecodable("the gzip body is cut short")
        yield piece
