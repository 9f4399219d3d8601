"""A process to be killed: `faregate journal archive JOURNAL TARGET`, which ends by SIGKILL at a place of `steps`.

python -m tests.archive.worker PLACE JOURNAL TARGET
"""

import os
import signal
import sys

from faregate.cli import main
from tests.archive.steps import Plain, stop_at

if __name__ == "__main__":
    place, *arguments = sys.argv[1:]
    stop_at(place, lambda: os.kill(os.getpid(), signal.SIGKILL), Plain())
    sys.argv = ["faregate", "journal", "archive", *arguments]
    main()
