"""What Spark's checkpoint says of how far a query has read.

    CHECKPOINT/commits/N      batch N is done
    CHECKPOINT/offsets/N      where it ended: the last line, as the source wrote it

Only of a checkpoint in a folder of this machine; of another one nothing is known here.
"""

import json
from pathlib import Path
from urllib.parse import urlsplit


def committed_end(checkpoint: str) -> int:
    """The offset behind the last batch that is done; 0 when there is none, or nobody knows."""
    parts = urlsplit(checkpoint)
    if parts.scheme not in ("", "file"):
        return 0
    folder = Path(parts.path)
    try:
        done = max((int(each.name) for each in (folder / "commits").iterdir() if each.name.isdigit()), default=None)
        if done is None:
            return 0
        return int(json.loads((folder / "offsets" / str(done)).read_text().splitlines()[-1])["0"])
    except (OSError, ValueError, KeyError, IndexError):
        return 0
