"""The filters of all queries on one DataFrame of `fg.spark.messages`.

Up to Spark 4.3 at least, the queries that use one DataFrame share what its source planned last: a join of it with
itself would read both sides with the filters of one, and a query without filters would read with those of the query
before. So:
- Every query has a filter (`NO_OFFSET`), so that there is a plan for each.
- A plan reads what any filter so far may want. They are noted down in a file, because Spark asks another process for
  each plan, all on the driver's machine. Spark removes the file with its own ones.
"""

import os
import tempfile
from pathlib import Path

import msgspec

from faregate.spark.source.conditions import ALL, Condition, Wanted

NO_OFFSET = -1
"""All offsets are greater."""
_EVERY = Condition("offset", "<=", (NO_OFFSET,), True)

MOST = 32
"""So many different ones are asked of each row; with more, everything is read."""

_decode = msgspec.json.Decoder(tuple[Condition, ...]).decode


def remember(load: str | None, conditions: tuple[Condition, ...]) -> Wanted:
    """Note these down, and return what was wanted so far. Raises `OSError`: others would lack rows without the note."""
    file = os.open(_place() / f"faregate-filters-{load}", os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600)
    try:
        os.write(file, msgspec.json.encode([each for each in conditions if each != _EVERY]) + b"\n")
        noted = dict.fromkeys(os.pread(file, os.fstat(file).st_size, 0).splitlines())
    finally:
        os.close(file)
    wanted = tuple(map(_decode, noted))
    return wanted if all(wanted) and len(wanted) <= MOST else ALL


def _place() -> Path:
    return Path(os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0] or tempfile.gettempdir())
