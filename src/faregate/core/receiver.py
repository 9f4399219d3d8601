"""What both ways of handling share: reading a delivery, counting how it ended, and the `after` middlewares.

`direct.py` handles messages of nodes without a store, `unit.py` those of nodes with one.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, NoReturn

from faregate.codec import BodyReader
from faregate.core.alarms import Alarms
from faregate.core.context import Context, Settled
from faregate.core.outgoing_middlewares import compile_outgoing
from faregate.core.pipeline import compile_after, compile_pipeline, resource_places, sends_in_scope
from faregate.core.sender import Sender
from faregate.core.verdict import Verdict, first_line, judge
from faregate.errors import MissingProperties, Permanent, StaleLock, UnknownType
from faregate.ids import message_id_of
from faregate.message import Envelope
from faregate.node.node import Node
from faregate.node.policy import Serial
from faregate.node.subscription import Subscription
from faregate.plain import plain
from faregate.ports import faults
from faregate.ports.clock import Clock
from faregate.ports.queue import Delivery

log = logging.getLogger("faregate.bus")

OUTCOMES: tuple[Settled, ...] = ("handled", "skipped", "duplicate", "redelivered", "dead", "lost")


class Receiver(ABC):
    """The messages of one subscription, from the delivery to how they ended."""

    has_store = False

    def __init__(
        self,
        subscription: Subscription,
        node: Node,
        sender: Sender,
        *,
        clock: Clock,
        alarms: Alarms,
        pool: Executor,
        body_limit: int,
    ) -> None:
        self.subscription = subscription
        self.outcomes: dict[Settled, int] = dict.fromkeys(OUTCOMES, 0)
        self.paused = False
        self.put_off = False
        """A message of a serial subscription waits for a later try; what was fetched behind it has to go back."""
        self._serial = isinstance(subscription.order, Serial)
        self._node = node.name
        self._type = subscription.message_type.wire
        self._kind = subscription.message_type.kind
        self._sender = sender
        self._clock = clock
        self._alarms = alarms
        self._leaves_behind = False
        """Whether that alarm has sounded."""
        self._read = BodyReader(subscription.message_type.cls, limit=body_limit).read
        told = [subscription.key if subscription.by_key else None, subscription.identity]
        self._told = [key for key in told if key is not None and key.function is not None]
        """Keys that functions tell; a function may fail."""
        self._pipeline: Callable[[Context], Awaitable[None]] = compile_pipeline(
            subscription, node, clock, pool, self._send_outputs
        )
        self._outgoing = compile_outgoing(node, resource_places(subscription, node))
        self._sends_in_scope = sends_in_scope(node)
        """Whether the pipeline has sent what the handler sends."""
        self._after = compile_after(node)

    @abstractmethod
    async def _send_outputs(self, ctx: Context) -> None:
        """Take what the handler sends, within the outgoing middlewares."""

    @abstractmethod
    async def handle(self, deliveries: list[Delivery]) -> list[Delivery]:
        """See the deliveries to their end, but for those that it returns: they shall come again, each alone.

        Raises `StaleLock` when one belongs to someone else by now.
        """

    @property
    def stopped(self) -> bool:
        """Whether nothing more may begin."""
        return self.paused or self.put_off

    def pause(self) -> None:
        """Let nothing more begin."""
        self.paused = True

    async def give_back(self, delivery: Delivery, *, begun: bool = False) -> None:
        """It goes back to its place."""
        try:
            await delivery.release(begun=begun)
        except StaleLock as exc:
            log.warning("%s: %s; it is delivered again", self.subscription, exc)

    async def redeliver(self, delivery: Delivery, delay: float, *, counted: bool) -> None:
        """It comes again later; in a serial subscription what is behind it waits for that."""
        await delivery.redeliver(delay, counted=counted)
        self.put_off = self._serial

    @property
    def batch(self) -> int:
        """How many deliveries are best handled together, as far as one knows by now."""
        return 1

    def current(self, deliveries: list[Delivery]) -> Delivery:
        """Which of those that are being handled together is being handled."""
        return deliveries[0]

    def _open(self, delivery: Delivery) -> Context:
        """The context of a delivery. Raises `Permanent` for one that cannot be read."""
        envelope = delivery.envelope
        if envelope.type != self._type or envelope.kind != self._kind or not envelope.publication_id:
            self._refuse(envelope)
        message = self._read(envelope)
        for key in self._told:
            key.check(message)
        ctx = Context(self._node, delivery, message)
        ctx._left_behind = self._left_behind
        return ctx

    def _left_behind(self, ctx: Context) -> None:
        if not self._leaves_behind:
            self._leaves_behind = True
            self._alarms.sound(
                "left-behind",
                self._node,
                ctx.message_id,
                f"the handler {self.subscription.name!r} leaves tasks or threads behind: one used ctx after the try of "
                f"{ctx} had ended, and was refused. Await everything before the handler returns or raises",
            )

    def _refuse(self, envelope: Envelope) -> NoReturn:
        """Say what is missing or wrong."""
        if not envelope.publication_id:
            raise MissingProperties("the message has no publication id, so it cannot be told from a repetition")
        if not envelope.type:
            raise MissingProperties("the message does not say what type it is")
        raise UnknownType(
            f"{self.subscription} handles the {self._kind} {self._type}, not the {envelope.kind} {plain(envelope.type)}"
        )

    def _judge(self, delivery: Delivery, ctx: Context | None, exc: BaseException) -> Verdict:
        """What becomes of a message that failed; logged, so that nobody has to guess."""
        if ctx is not None:
            ctx.error = exc
        verdict = judge(exc, delivery.redeliveries, self.subscription.redeliver.delays)
        what = str(ctx) if ctx is not None else f"{delivery.envelope} at {self._node}"
        if verdict.delay is None:
            return verdict  # `_gave_up` tells, once that is certain
        if verdict.counted:
            log.warning("%s failed and is delivered again in %g s: %s", what, verdict.delay, first_line(exc))
        else:
            log.info("%s is delivered again in %g s, as asked: %s", what, verdict.delay, first_line(exc))
        return verdict

    def _gave_up(self, delivery: Delivery, reason: str, text: str) -> None:
        """It is a dead letter now: somebody has to learn of that."""
        tries = "after all its tries" if reason == "failed" else f"({reason})"
        message_id = message_id_of(delivery.envelope, self._node)
        told = f"{delivery.envelope} is given up {tries} by {self.subscription}: {text}"
        self._alarms.sound("dead-letter", self._node, message_id, told)

    def abandoned(self, delivery: Delivery, reason: str, error: str) -> Coroutine[Any, Any, None]:
        """Somebody else gave up on a message, so no handler sees it: it expired, or its deliveries are used up.

        It is counted and told of at once; what is returned runs the `after` middlewares.
        """
        self.outcomes["dead"] += 1
        self._gave_up(delivery, reason, error)
        ctx = None
        if self._after is not None:
            try:
                ctx = self._open(delivery)
            except Exception as exc:
                log.debug("%s cannot be read: %s", delivery.envelope, first_line(exc))
        return self._run_after(delivery, ctx, "dead", Permanent(f"{reason}: {error}"))

    async def _finish(
        self, delivery: Delivery, ctx: Context | None, outcome: Settled, error: BaseException | None = None
    ) -> None:
        """It is settled: nothing from here on can change what became of it."""
        self.outcomes[outcome] += 1
        if faults.hook is not None:
            await faults.hook("bus.after-settle")
        if self._after is not None:
            await self._run_after(delivery, ctx, outcome, error)

    async def _run_after(
        self, delivery: Delivery, ctx: Context | None, outcome: Settled, error: BaseException | None
    ) -> None:
        if self._after is None:
            return
        if ctx is None:  # it cannot be read
            ctx = Context(self._node, delivery, None)
        ctx.error = error or ctx.error
        ctx._outcome = outcome
        try:
            await self._after(ctx)
        except Exception:
            log.exception("a middleware after the core failed; %s stays %s", ctx, outcome)
