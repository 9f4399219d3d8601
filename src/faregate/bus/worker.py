"""Works on the deliveries of one subscription: validate, run the pipeline, publish the outputs, settle.

    validate -> pipeline (middlewares, retries, handler) -> publish outputs -> settle
                   `-- failed --> redeliver later, or poison with the reason
    and in any case -> `after` middlewares

Nothing after the settling can change what became of a message. Room is left here for the kill switch, which
decides before the pipeline, and for the unit of work, which wraps pipeline and outputs.
"""

import asyncio
import logging
import traceback
from concurrent.futures import Executor
from dataclasses import replace
from typing import NoReturn

from faregate.bus.context import Context, Settled
from faregate.bus.lanes import Lanes
from faregate.bus.node import Node
from faregate.bus.pipeline import compile_after, compile_pipeline
from faregate.bus.policy import ByKey
from faregate.bus.sender import Sender
from faregate.bus.subscription import Subscription
from faregate.codec import BodyReader
from faregate.errors import (
    ConfigurationError,
    MissingProperties,
    Permanent,
    RetryAfter,
    StaleLock,
    UnknownType,
)
from faregate.message import Envelope
from faregate.ports import faults
from faregate.ports.clock import Clock, Timer
from faregate.ports.queue import Consumer, Delivery, QueueTransport

log = logging.getLogger("faregate.bus")

_LONGEST_ERROR = 16_384


class Worker:
    def __init__(
        self,
        subscription: Subscription,
        node: Node,
        sender: Sender,
        *,
        transport: QueueTransport,
        clock: Clock,
        pool: Executor,
        body_limit: int,
    ) -> None:
        self.subscription = subscription
        self.binding = replace(subscription.binding(body_limit), on_abandoned=self._abandoned)
        self.outcomes: dict[Settled, int] = dict.fromkeys(("handled", "skipped", "redelivered", "dead", "lost"), 0)
        self._node = node.name
        self._type = subscription.message_type.wire
        self._kind = subscription.message_type.kind
        self._sender = sender
        self._transport = transport
        self._clock = clock
        self._read = BodyReader(subscription.message_type.cls, limit=body_limit).read
        self._pipeline = compile_pipeline(subscription, node, clock, pool)
        self._after = compile_after(node)
        self._lanes = Lanes(
            subscription.order.lanes,
            self._work,
            by_key=isinstance(subscription.order, ByKey),
        )
        self._consumer: Consumer | None = None
        self._held: set[Delivery] = set()
        self._renewal: Timer | None = None
        self._resumption: Timer | None = None
        self.paused = False

    @property
    def busy(self) -> int:
        """How many messages are being worked on."""
        return self._lanes.busy

    # --- life ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._consumer = await self._transport.consume(
            self.binding.queue, self._take, prefetch=self.subscription.prefetch
        )
        if self.paused:
            self._consumer.pause()

    async def stop(self, deadline: float) -> None:
        """Take nothing more, finish what runs within the deadline, give the rest back."""
        if self._resumption is not None:
            self._resumption.cancel()
        if self._consumer is not None:
            self._consumer.pause()
            await self._lanes.close(deadline)
            await self._consumer.close()
        if self._renewal is not None:
            self._renewal.cancel()

    def pause(self, seconds: float | None) -> None:
        self.resume()
        self.paused = True
        if self._consumer is not None:
            self._consumer.pause()
        if seconds is not None:
            self._resumption = self._clock.call_later(seconds, self.resume)

    def resume(self) -> None:
        if self._resumption is not None:
            self._resumption.cancel()
            self._resumption = None
        self.paused = False
        if self._consumer is not None:
            self._consumer.resume()

    def _take(self, delivery: Delivery) -> None:
        self._held.add(delivery)
        if self._renewal is None:
            self._renewal = self._clock.call_later(delivery.lock_seconds / 3, self._renew)
        self._lanes.submit(delivery)

    def _renew(self) -> None:
        """Keep the locks on everything that is worked on or waits in a lane."""
        self._renewal = None
        for delivery in list(self._held):
            try:
                delivery.renew()
            except StaleLock:
                self._held.discard(delivery)
        if self._held:
            period = min(delivery.lock_seconds for delivery in self._held) / 3
            self._renewal = self._clock.call_later(period, self._renew)

    # --- one delivery -------------------------------------------------------------------------------------

    async def _work(self, delivery: Delivery) -> None:
        try:
            await self._handle(delivery)
        except StaleLock as exc:
            self.outcomes["lost"] += 1
            log.warning("%s: %s; it is delivered again", self.subscription, exc)
        except faults.Crash:
            await self._vanish()
        finally:
            self._held.discard(delivery)

    async def _handle(self, delivery: Delivery) -> None:
        delivery.start()
        ctx: Context | None = None
        envelope = delivery.envelope
        try:
            if envelope.type != self._type or envelope.kind != self._kind or not envelope.publication_id:
                self._refuse(envelope)
            ctx = Context(self._node, delivery, self._read(envelope))
            await self._pipeline(ctx)
            if faults.hook is not None:
                await faults.hook("bus.after-handler")
            if ctx._outputs and ctx._completed:
                await self._sender.publish_outputs(await self._sender.seal_outputs(ctx, self.subscription.name))
        except Exception as exc:
            outcome = await self._fail(delivery, ctx, exc)
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                await delivery.release()
                raise
            outcome = await self._fail(delivery, ctx, exc)
        else:
            if faults.hook is not None:
                await faults.hook("bus.before-settle")
            outcome = "handled" if ctx._completed else "skipped"
            await delivery.settle(outcome)
        self.outcomes[outcome] += 1
        if faults.hook is not None:
            await faults.hook("bus.after-settle")
        if self._after is not None and ctx is not None:
            ctx._outcome = outcome
            try:
                await self._after(ctx)
            except Exception:
                log.exception("a middleware after the core failed; %s stays %s", ctx, outcome)

    def _refuse(self, envelope: Envelope) -> NoReturn:
        """Say what is missing or wrong."""
        if not envelope.publication_id:
            raise MissingProperties("the message has no publication id, so it cannot be told from a repetition")
        if not envelope.type:
            raise MissingProperties("the message does not say what type it is")
        raise UnknownType(
            f"{self.subscription} handles the {self._kind} {self._type}, not the {envelope.kind} {envelope.type}"
        )

    async def _fail(self, delivery: Delivery, ctx: Context | None, exc: BaseException) -> Settled:
        """Decide what becomes of a message whose tries in memory are used up."""
        if ctx is not None:
            ctx.error = exc
        what = str(ctx) if ctx is not None else f"{delivery.envelope} at {self._node}"
        if isinstance(exc, Permanent | ConfigurationError):
            reason = exc.reason if isinstance(exc, Permanent) else "permanent"
            await delivery.poison(reason, describe_error(exc))
            log.error("%s is given up (%s): %s", what, reason, _first_line(exc))
            return "dead"
        asked = exc.seconds if isinstance(exc, RetryAfter) else getattr(exc, "retry_after", None)
        delays = self.subscription.redeliver.delays
        if isinstance(asked, int | float) and 0 <= asked < float("inf"):
            await delivery.redeliver(float(asked), counted=False)
            log.info("%s is delivered again in %g s, as asked: %s", what, asked, _first_line(exc))
            return "redelivered"
        if delivery.redeliveries < len(delays):
            delay = delays[delivery.redeliveries]
            await delivery.redeliver(delay)
            log.warning("%s failed and is delivered again in %g s: %s", what, delay, _first_line(exc))
            return "redelivered"
        await delivery.poison("failed", describe_error(exc))
        log.error("%s is given up after all its tries: %s", what, _first_line(exc))
        return "dead"

    def _abandoned(self) -> None:
        self.outcomes["dead"] += 1

    async def _vanish(self) -> None:
        """A test crashed us: everything held goes back, as it does when a process dies."""
        if self._consumer is not None:
            self._held.clear()
            await self._consumer.close()
            await self.start()


def _first_line(exc: BaseException) -> str:
    """The exception's class and text; the text of a broken `__str__` is said to be so."""
    try:
        text = str(exc)
    except Exception as broken:
        text = f"(its text is unreadable: {type(broken).__name__})"
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def describe_error(exc: BaseException) -> str:
    """What a dead letter says of its error: one line, then the traceback, bounded."""
    try:
        trace = "".join(traceback.format_exception(exc))
    except Exception as broken:
        trace = f"(no traceback: {type(broken).__name__})"
    return f"{_first_line(exc)}\n\n{trace}"[:_LONGEST_ERROR]
