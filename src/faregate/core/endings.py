"""How messages of one subscription end: counted, told of where somebody must learn of it, then `after` middlewares.

Nothing here can change what became of a message.
"""

import logging

from faregate.core.alarms import Alarms
from faregate.core.context import Context, Ending
from faregate.core.pipeline import compile_after
from faregate.core.resources import Resources
from faregate.core.verdict import Verdict, failure_of, first_line
from faregate.core.work import Work
from faregate.ids import message_id_of
from faregate.node.subscription import Subscription
from faregate.ports import faults
from faregate.ports.queue import Delivery

log = logging.getLogger("faregate.bus")

OUTCOMES: tuple[Ending, ...] = ("handled", "skipped", "filtered", "duplicate", "redelivered", "dead", "lost")


class Endings:
    def __init__(self, subscription: Subscription, resources: Resources, alarms: Alarms) -> None:
        self.outcomes: dict[Ending, int] = dict.fromkeys(OUTCOMES, 0)
        self._subscription = subscription
        self._node = resources.node.name
        self._alarms = alarms
        self._after = compile_after(resources)

    @property
    def has_after(self) -> bool:
        """Whether there are middlewares after the core."""
        return self._after is not None

    def failed(self, what: object, verdict: Verdict, exc: BaseException) -> None:
        """Somebody may wonder why it comes again."""
        if verdict.delay is None:
            return  # `dead_lettered` tells, once that is certain
        if verdict.behind:
            log.warning("%s failed and goes to the end of its queue in %g s: %s", what, verdict.delay, first_line(exc))
        elif verdict.counted:
            log.warning("%s failed and is delivered again in %g s: %s", what, verdict.delay, first_line(exc))
        else:
            log.info("%s is delivered again in %g s, as asked: %s", what, verdict.delay, first_line(exc))

    def dead_lettered(self, delivery: Delivery, reason: str, text: str) -> None:
        """Somebody has to learn of it."""
        why = "after all its tries" if reason == "failed" else reason
        message_id = message_id_of(delivery.envelope, self._node)
        told = f"{delivery.envelope} is a dead letter ({why}) of {self._subscription}: {text}"
        self._alarms.sound("dead-letter", self._node, message_id, told)

    def lost(self, exc: BaseException) -> None:
        """Its lock had expired: the message is someone else's now."""
        self.outcomes["lost"] += 1
        log.warning("%s: %s; it is delivered again", self._subscription, exc)

    async def finish(
        self, delivery: Delivery, ctx: Context | None, outcome: Ending, error: BaseException | None = None
    ) -> None:
        """It is settled."""
        self.outcomes[outcome] += 1
        if faults.hook is not None:
            await faults.hook("bus.after-settle")
        if self._after is not None:
            await self.run_after(delivery, ctx, outcome, error)

    async def run_after(
        self, delivery: Delivery, ctx: Context | None, outcome: Ending, error: BaseException | None
    ) -> None:
        if self._after is None:
            return
        if ctx is None:  # it cannot be read
            ctx = Context(Work(delivery, self._node), None)
        ctx.error = error or ctx.error
        ctx._outcome = outcome
        try:
            await self._after(ctx)
        except BaseException as exc:
            if failure_of(exc) is None:
                raise
            log.exception("a middleware after the core failed; %s stays %s", ctx, outcome)
