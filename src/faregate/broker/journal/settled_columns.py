"""A side log as columns: all records at once, each with its CRC checked. For jobs that read millions of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from faregate.broker.journal.settled import RECORD_BYTES
from faregate.ports.log import OUTCOME_NAMES

RECORD = np.dtype(
    {
        "names": ["offset", "queue", "outcome", "tries", "redeliveries", "time", "crc"],
        "formats": ["<u8", "<u4", "u1", "<u2", "<u2", "<f8", "<u4"],
        "offsets": [0, 8, 12, 14, 16, 20, 28],
        "itemsize": RECORD_BYTES,
    }
)
_SUMMED_BYTES = 28
_COLUMNS = {"offset": "i8", "queue": "i4", "outcome": "i4", "tries": "i4", "redeliveries": "i4", "time": "f8"}


def _crc_table() -> Any:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0xEDB88320), table >> 1)
    return table


_TABLE = _crc_table()


def read_settled(path: Path, size: int) -> Any:
    """The sound records in the first `size` bytes, as `faregate.ports.log.Settled` has them."""
    data = b""
    if size:
        with path.open("rb") as file:
            data = file.read(size)
    count = len(data) // RECORD_BYTES
    records = np.frombuffer(data, RECORD, count)
    plain = np.frombuffer(data, np.uint8, count * RECORD_BYTES).reshape(count, RECORD_BYTES)
    found = records[(checksums(plain) == records["crc"]) & np.isin(records["outcome"], list(OUTCOME_NAMES))]
    return pa.RecordBatch.from_arrays([pa.array(found[name].astype(to)) for name, to in _COLUMNS.items()], [*_COLUMNS])


def checksums(plain: Any) -> Any:
    """The CRC-32 that each record should have, from its bytes: all records a byte at a time."""
    sums = np.full(len(plain), 0xFFFFFFFF, np.uint32)
    for place in range(_SUMMED_BYTES):
        sums = _TABLE[(sums ^ plain[:, place]) & 0xFF] ^ (sums >> np.uint32(8))
    return sums ^ np.uint32(0xFFFFFFFF)
