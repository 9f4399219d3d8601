"""CRC-32 as zlib defines it: from zlib-ng where it is installed, which is ten times as fast with a frame of columns."""

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
