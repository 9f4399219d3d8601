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
    "unit.before-commit": "everything is in the transaction; it is not committed",
    "unit.after-commit": "the transaction is committed; the delivery is not settled, nothing is dispatched",
    "bus.before-settle": "the outcome is decided and safe; the delivery is not settled",
    "bus.after-settle": "the delivery is settled; the after-middlewares have not run",
    "bus.before-publish": "outgoing messages are sealed and about to be handed to the transport",
    "bus.after-publish": "the transport confirmed the outgoing messages",
    "tokens.resolved": "outbox rows have got their recipients; not committed",
    "tokens.registered": "a fresh attempt is registered with its outbox row; its token is not created",
    "tokens.created": "the token of the attempt is created; the attempt is not chosen",
    "tokens.chosen": "the attempt is chosen; its signal is not sent",
    "tokens.claim-recorded": "the recipient recorded a claim; the token is not claimed",
    "tokens.claimed": "the recipient claimed the token; the handler has not run",
    "tokens.deleted": "the token is deleted; the claim is still recorded",
    "tokens.forgotten": "token and claim are deleted; the delivery is not settled",
    "dispatch.before-remove": "confirmed messages are about to be taken out of the outbox",
    "ticks.before-commit": "a schedule is moved on, and its ticks are made; not committed",
    "ticks.after-commit": "the ticks of a schedule are committed; nothing is dispatched",
}


class Crash(BaseException):
    """Raised by a test's hook: for the message it is as if the process had died."""
