"""A command in a process that is killed before one of its steps: python -m tests.rabbitmq.killed STEP COMMAND…

Steps are what it asks of the broker and of the store, and its acknowledgements.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from faregate.cli import main
from faregate.stores.sql.records import SqlStore
from faregate.transports.rabbitmq import RabbitmqQueue
from faregate.transports.rabbitmq.channels import BatchChannel

STEPS: list[tuple[type, str]] = [
    (RabbitmqQueue, "on_channel"),
    (RabbitmqQueue, "put"),
    (SqlStore, "claim_lease"),
    (SqlStore, "next_generation"),
    (SqlStore, "release_lease"),
    (BatchChannel, "acknowledgements"),
]


class Countdown:
    def __init__(self, steps: int) -> None:
        self._left = steps

    def before(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return work(*given)

        return counted


if __name__ == "__main__":
    countdown = Countdown(int(sys.argv.pop(1)))
    for owner, name in STEPS:
        setattr(owner, name, countdown.before(getattr(owner, name)))
    main()
