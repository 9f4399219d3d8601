"""Fault points: named places in the code where tests crash, delay or repeat things.

In production `hook` is None and a point costs one comparison:

    if faults.hook is not None:
        await faults.hook("bus.before-settle")
"""

from collections.abc import Awaitable, Callable

hook: Callable[[str], Awaitable[None]] | None = None

POINTS: dict[str, str] = {
    "bus.before-handler": "a delivery was decoded; its handler is about to run",
    "bus.after-handler": "the handler and the middlewares are done; nothing has been published or settled",
    "bus.before-settle": "the outgoing messages are published; the delivery is not settled",
    "bus.after-settle": "the delivery is settled; the after-middlewares have not run",
    "bus.before-publish": "outgoing messages are sealed and about to be handed to the transport",
    "bus.after-publish": "the transport confirmed the outgoing messages",
}


class Crash(BaseException):
    """Raised by a test's hook: as far as the message can tell, the process is gone."""
