"""AMQP 1.0, as far as the messages of a stream need it: sections out of bytes, and bytes out of sections.

A message is sections, each a described value: annotations, properties, application properties, the body. The first byte
says what a value is, and the upper half of it how long it is, so that values of no use are passed over.
"""

import struct
from typing import Any
from uuid import UUID

_DELIVERY_ANNOTATIONS, _ANNOTATIONS, _PROPERTIES, _APPLICATION = 0x71, 0x72, 0x73, 0x74
_DATA, _VALUE, _FOOTER = 0x75, 0x77, 0x78

_FIXED = {0x40: 0, 0x50: 1, 0x60: 2, 0x70: 4, 0x80: 8, 0x90: 16}
_SMALL = {0x40: None, 0x41: True, 0x42: False, 0x43: 0, 0x44: 0, 0x45: None}
_NUMBERS: dict[int, struct.Struct] = {
    0x50: struct.Struct(">B"), 0x51: struct.Struct(">b"), 0x52: struct.Struct(">B"), 0x53: struct.Struct(">B"),
    0x54: struct.Struct(">b"), 0x55: struct.Struct(">b"), 0x60: struct.Struct(">H"), 0x61: struct.Struct(">h"),
    0x70: struct.Struct(">I"), 0x71: struct.Struct(">i"), 0x72: struct.Struct(">f"), 0x80: struct.Struct(">Q"),
    0x81: struct.Struct(">q"), 0x82: struct.Struct(">d"), 0x83: struct.Struct(">q"),
}  # fmt: skip
_length = struct.Struct(">I").unpack_from


class Malformed(ValueError):
    """These bytes are no message of AMQP 1.0."""


def read_message(data: bytes) -> tuple[list[Any], dict[str, Any], bytes]:
    """The properties, in their order; the application properties, and behind them the annotations that they lack; the
    body. Raises `Malformed`."""
    properties: list[Any] = []
    headers: dict[str, Any] = {}
    annotations: dict[str, Any] = {}
    body = b""
    at, end = 0, len(data)
    try:
        while at < end:
            if data[at] != 0 or data[at + 1] != 0x53:
                raise Malformed("a section is not described by a small number")
            section = data[at + 2]
            at += 3
            if section == _APPLICATION:
                at = _read_map(data, at, headers)
            elif section == _DATA:
                size = data[at + 1] if data[at] == 0xA0 else _length(data, at + 1)[0]
                start = at + (2 if data[at] == 0xA0 else 5)
                at = start + size
                body = body + data[start:at] if body else data[start:at]
            elif section == _PROPERTIES:
                properties, at = _read_list(data, at)
            elif section == _ANNOTATIONS:
                at = _read_map(data, at, annotations)
            elif section == _VALUE:
                value, at = _read(data, at)
                body = value if isinstance(value, bytes) else str(value).encode()
            else:
                _, at = _read(data, at)
    except (IndexError, struct.error, ValueError, TypeError) as exc:
        raise Malformed(str(exc)) from exc
    if at != end:
        raise Malformed("it ends in the middle of a section")
    if annotations:
        headers = {**annotations, **headers}
    return properties, headers, body


def _read(data: bytes, at: int) -> tuple[Any, int]:
    """The value at a place, and where it ends; None for one of no use."""
    code = data[at]
    at += 1
    if code in (0xA1, 0xA3):
        end = at + 1 + data[at]
        return data[at + 1 : end].decode(), end
    kind = code & 0xF0
    if kind in _FIXED:
        end = at + _FIXED[kind]
        if code == 0x56:
            return data[at] == 1, end
        if code == 0x98:  # from 3.13 on the broker makes it of such a text
            return UUID(bytes=data[at:end]).urn, end
        number = _NUMBERS.get(code)
        return (_SMALL.get(code) if number is None else number.unpack_from(data, at)[0]), end
    at, end = (at + 1, at + 1 + data[at]) if kind in (0xA0, 0xC0, 0xE0) else (at + 4, at + 4 + _length(data, at)[0])
    if code in (0xA0, 0xB0):
        return data[at:end], end
    if code in (0xB1, 0xB3):
        return data[at:end].decode(), end
    return None, end


def _compound(data: bytes, at: int, small: int, large: int) -> tuple[int, int, int]:
    """Where the items of a list or map begin, where they end, and how many there are."""
    code = data[at]
    if code == small:
        return at + 3, at + 2 + data[at + 1], data[at + 2]
    if code == large:
        return at + 9, at + 5 + _length(data, at + 1)[0], _length(data, at + 5)[0]
    if code == 0x45:
        return at + 1, at + 1, 0
    raise Malformed(f"a section begins with {code:#x}")


def _read_list(data: bytes, at: int) -> tuple[list[Any], int]:
    at, end, count = _compound(data, at, 0xC0, 0xD0)
    found: list[Any] = []
    for _ in range(count):
        code = data[at]
        if code == 0x40:
            found.append(None)
            at += 1
        elif code == 0xA1 or code == 0xA3:
            stop = at + 2 + data[at + 1]
            found.append(data[at + 2 : stop].decode())
            at = stop
        else:
            value, at = _read(data, at)
            found.append(value)
    return found, end


def _read_map(data: bytes, at: int, found: dict[str, Any]) -> int:
    """Names are short texts, and mostly values are: those are read in place."""
    at, end, _ = _compound(data, at, 0xC1, 0xD1)
    while at < end:
        stop = at + 2 + data[at + 1]
        name = _NAMES.get(data[at:stop])
        if name is None:
            name, stop = _name(data, at)
        at = stop
        if data[at] == 0xA1:
            stop = at + 2 + data[at + 1]
            found[name] = data[at + 2 : stop].decode()
            at = stop
        else:
            found[name], at = _read(data, at)
    return end


_NAMES: dict[bytes, str] = {}
"""By the bytes that stand for them: few, and the same over and over."""
_MOST_NAMES = 1000


def _name(data: bytes, at: int) -> tuple[str, int]:
    name, end = _read(data, at)
    if not isinstance(name, str):
        raise Malformed(f"{name!r} is no name of a header")
    if data[at] in (0xA1, 0xA3) and len(_NAMES) < _MOST_NAMES:
        _NAMES[data[at:end]] = name
    return name, end


def text(value: str, small: int = 0xA1, large: int = 0xB1) -> bytes:
    """Text as it stands in a section; with 0xA3 and 0xB3, a symbol."""
    return _sized(value.encode(), small, large)


def _sized(data: bytes, small: int, large: int) -> bytes:
    size = len(data)
    return _HEADS[small][size] + data if size < 256 else bytes((large,)) + size.to_bytes(4, "big") + data


_HEADS = {code: [bytes((code, size)) for size in range(256)] for code in (0xA0, 0xA1, 0xA3)}


def write_properties(message_id: str, correlation_id: str, content_type: bytes, milliseconds: int) -> bytes:
    """`content_type`: type and encoding as `content` makes them."""
    items = b"".join(
        (
            text(message_id), b"@@@@", text(correlation_id) if correlation_id else b"@", content_type, b"@\x83",
            milliseconds.to_bytes(8, "big", signed=True),
        )
    )  # fmt: skip
    if len(items) < 255:
        return b"\x00Ss\xc0" + bytes((len(items) + 1, 10)) + items
    return b"\x00Ss\xd0" + (len(items) + 4).to_bytes(4, "big") + b"\x00\x00\x00\x0a" + items


def content(content_type: str, content_encoding: str | None) -> bytes:
    encoding = b"@" if content_encoding is None else text(content_encoding, 0xA3, 0xB3)
    return text(content_type, 0xA3, 0xB3) + encoding


def write_headers(items: list[bytes]) -> bytes:
    """Application properties from names and values, each as `text` or `number` makes it."""
    data = b"".join(items)
    return b"\x00St\xd1" + (len(data) + 4).to_bytes(4, "big") + len(items).to_bytes(4, "big") + data


def number(value: int) -> bytes:
    return b"\x81" + value.to_bytes(8, "big", signed=True)


def write_body(body: bytes) -> bytes:
    return b"\x00Su" + _sized(body, 0xA0, 0xB0)
