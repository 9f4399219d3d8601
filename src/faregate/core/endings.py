"""How messages of one subscription end: counted, told of where somebody must learn of it, then `after` middlewares.

Nothing here can change what became of a message.
"""

import logging

from faregate.core.about import about_delivery
from faregate.core.alarms import Alarms
from faregate.core.context import Context, Ending
from faregate.core.pipeline import compile_after
from faregate.core.resources import Resources
from faregate.core.verdict import Verdict, failure_of, first_line, first_line_of
from faregate.core.work import Work
from faregate.ids import message_id_of
from faregate.node.subscription import Subscription
from faregate.ports import faults
from faregate.ports.queue import Delivery
from faregate.units import seconds_text

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

    def failed(self, work: Work, verdict: Verdict, exc: BaseException) -> None:
        """Somebody may wonder why it comes again."""
        if verdict.delay is None:
            return  # `dead_lettered` tells, once that is certain
        if verdict.behind:
            level, text = logging.WARNING, "%s failed and goes to the end of its queue in %s: %s"
        elif verdict.counted:
            level, text = logging.WARNING, "%s failed and is delivered again in %s: %s"
        else:
            level, text = logging.INFO, "%s is delivered again in %s, as asked: %s"
        what = work.ctx or f"{work.envelope} at {self._node}"
        extra = about_delivery(self._node, work.delivery)
        log.log(level, text, what, seconds_text(verdict.delay), first_line(exc), extra=extra)

    def dead_lettered(self, delivery: Delivery, reason: str, text: str) -> None:
        """Somebody has to learn of it."""
        why = "after all its tries" if reason == "failed" else reason
        envelope = delivery.envelope
        told = f"{envelope} is a dead letter ({why}) of {self._subscription}: {first_line_of(text)}"
        message_id = message_id_of(envelope, self._node)
        self._alarms.sound("dead-letter", self._node, message_id, told, envelope=envelope, key=delivery.key)

    def lost(self, delivery: Delivery, exc: BaseException) -> None:
        """Its lock had expired: the message is someone else's now."""
        self.outcomes["lost"] += 1
        extra = about_delivery(self._node, delivery)
        log.warning("%s: %s; it is delivered again", self._subscription, exc, extra=extra)

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
