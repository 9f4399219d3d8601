"""Checksums are zlib's, whoever computes them."""

import subprocess
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faregate.broker.journal import checksum

zlib_ng = pytest.importorskip("zlib_ng.zlib_ng")


@given(st.binary(max_size=20_000), st.integers(0, 2**32 - 1), st.integers(0, 64))
def test_it_is_the_same_checksum(data: bytes, before: int, start: int) -> None:
    view = memoryview(data)[start:]
    assert checksum.crc32(view, before) == zlib.crc32(view, before)
    assert checksum.crc32(data) == zlib.crc32(data)


def test_the_fast_one_is_used_where_it_is_installed() -> None:
    assert checksum.crc32 is zlib_ng.crc32


def test_without_it_there_is_zlib() -> None:
    program = (
        "import sys; sys.modules['zlib_ng'] = None\n"
        "import zlib\n"
        "from faregate.broker.journal import checksum, frame\n"
        "assert checksum.crc32 is zlib.crc32 is frame.crc32\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
