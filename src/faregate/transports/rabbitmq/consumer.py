"""Consumes a queue: hands out deliveries, acknowledges them together, gives back what is not handled.

Rules kept here:
- A consumer that is lost, with its channel, its connection or its queue, is made anew until it is closed. What it held
  is someone else's then: ending it raises `StaleLock`, and nothing is acknowledged on another channel.
- Acknowledgements wait for the end of the event loop's turn, and go out together: one for all up to the first that is
  not done, single ones behind it.
- In an ordered queue nothing is ever returned by itself, since it would come back in another place. To give something
  back, the consumer hands out no more, waits until all that is out has ended, and closes its channel: so everything is
  in its place again. Pausing does the same, in any queue.
"""

import asyncio
import logging
from bisect import bisect
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiormq.exceptions import ChannelAccessRefused, ChannelNotFoundEntity

from faregate.errors import ConfigurationError, QueueNotFound, StaleLock
from faregate.ports.cancellation import end
from faregate.transports.rabbitmq.channels import BatchChannel
from faregate.transports.rabbitmq.frames import Arrived
from faregate.transports.rabbitmq.link import LOST, Link, not_cancelled

log = logging.getLogger("faregate.rabbitmq")

_PAUSE_SECONDS = 0.5
"""Before a lost consumer is made anew. One that the broker cancelled waits, too: its queue is being deleted, and 4.0
ends the connection of whoever consumes a queue in that moment."""
_TAKEN_IN_SECONDS = 0.1
"""A quorum queue has taken in acknowledgements by then. What it has not when the channel closes, the broker forgets,
and delivers those messages again."""
_MOST_PREFETCH = 65_535
_HELD_TOO_LONG = "delivery acknowledgement on channel"
"""How the broker says it, with the end of the channel. From 4.3 on it cancels the consumer, and says nothing."""
_TOO_LONG = (
    "a handler, or a message behind it, took longer than RabbitMQ lets a consumer hold one (consumer_timeout, 30 "
    "minutes if nobody changed it). RabbitMQ delivers what was held again; what is handled by then is recognised where "
    "dedup is on. Raise consumer_timeout, lower prefetch=, or let the handler end sooner and go on with a message to "
    "itself"
)


class Session:
    """A consumer on one channel, from `consume` until that channel is closed."""

    def __init__(self, channel: BatchChannel, *, ordered: bool, changed: Callable[[], None]) -> None:
        """`changed` is called when the consumer may have to do something about it."""
        self._channel = channel
        self._ordered = ordered
        self._changed = changed
        self.lost = False
        self.recycled = False
        """Something was given back in its place: the channel has to be closed."""
        self._open: dict[int, None] = {}
        """The tags of what arrived and is not ended, in order; and of what waits for the channel to be closed."""
        self._out = 0
        self._done: list[int] = []
        self._returned: list[int] = []
        self._flushing: asyncio.Task[None] | None = None
        self._acknowledged_at = 0.0
        self.quiet = asyncio.Event()
        """Nothing is out."""
        self.quiet.set()

    def arrived(self, tag: int) -> None:
        self._open[tag] = None

    @property
    def holds(self) -> bool:
        return bool(self._open)

    def hand_out(self) -> None:
        self._out += 1
        self.quiet.clear()

    def end(self, tag: int, *, done: bool) -> bool:
        """It is acknowledged, or goes back. False: it is someone else's by now."""
        if self.lost:
            return False
        self._out -= 1
        if done or not self._ordered:
            del self._open[tag]
            (self._done if done else self._returned).append(tag)
            if self._flushing is None:
                self._flushing = asyncio.get_running_loop().create_task(self._flush())
        else:
            self.recycled = True
            self._changed()
        if not self._out:
            self.quiet.set()
        return True

    async def _flush(self) -> None:
        try:
            while (self._done or self._returned) and not self.lost:
                done, returned = sorted(self._done), self._returned
                self._done, self._returned = [], []
                first = next(iter(self._open), None)
                below = len(done) if first is None else bisect(done, first)
                up_to = done[below - 1] if below else 0
                await self._channel.write(self._channel.acknowledgements(returned, up_to, done[below:]))
                self._acknowledged_at = asyncio.get_running_loop().time()
        except LOST as exc:
            log.debug("acknowledgements are lost with their channel: %s", exc)
        finally:
            self._flushing = None

    async def close(self) -> None:
        """Acknowledge what is done; everything else is back in its place."""
        if self._flushing is not None:
            await asyncio.wait({self._flushing})
        if not self.lost:
            since = asyncio.get_running_loop().time() - self._acknowledged_at
            await asyncio.sleep(max(0.0, _TAKEN_IN_SECONDS - since))
        self.lost = True
        with suppress(*LOST):
            await self._channel.close()


class QueueConsumer:
    """A consumer of one queue, over any number of sessions."""

    def __init__(
        self,
        link: Link,
        queue: str,
        take: Callable[[Session, Arrived], None],
        declare: Callable[[BatchChannel], Awaitable[None]],
        *,
        prefetch: int,
        ordered: bool,
        on_close: Callable[["QueueConsumer"], None],
    ) -> None:
        """`declare` makes sure of the queue when it is gone."""
        self.queue = queue
        self._link = link
        self._take = take
        self._declare = declare
        self._prefetch = min(prefetch, _MOST_PREFETCH)
        self._ordered = ordered
        self._on_close = on_close
        self._paused = False
        self._closed = False
        self._is_refused = False
        self._held_back: list[Arrived] = []
        """What arrived and may not be handed out now."""
        self._session: Session | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Raises `QueueNotFound`."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(ready))
        await ready

    @property
    def out(self) -> bool:
        return self._session is not None and not self._session.quiet.is_set()

    def pause(self) -> None:
        self._paused = True
        self._changed.set()

    def resume(self) -> None:
        self._paused = False
        self._changed.set()
        session, held_back = self._session, self._held_back
        self._held_back = []
        for message in held_back:
            if session is not None and not session.lost:
                self._arrived(session, message)

    async def close(self) -> None:
        self._closed = True
        self._on_close(self)
        self._changed.set()
        if self._session is not None:
            await self._session.close()
        await end(self._task)

    # --- sessions --------------------------------------------------------------------------------------------

    async def _run(self, ready: asyncio.Future[None]) -> None:
        held_when_cancelled = False
        while not self._closed:
            if self._paused and ready.done():
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                with not_cancelled():
                    session, lost = await self._begin()
                    if held_when_cancelled:  # and the queue is there
                        log.warning("%s: RabbitMQ cancelled the consumer: it seems that %s", self.queue, _TOO_LONG)
                        held_when_cancelled = False
                    if not ready.done():
                        ready.set_result(None)
                    await self._until_over(session, lost)
                    cancelled = session.lost and not lost.done()
                    held_when_cancelled = cancelled and session.holds
                    await session.close()
                    if cancelled:
                        await asyncio.sleep(_PAUSE_SECONDS)
            except ChannelNotFoundEntity as exc:
                held_when_cancelled = False
                if not ready.done():
                    ready.set_exception(QueueNotFound(f"there is no queue {self.queue} on this RabbitMQ: {exc}"))
                    return
                if not self._is_refused:
                    log.warning("the queue %s is gone; it is declared anew", self.queue)
                await self._declare_again()
            except ChannelAccessRefused as exc:
                if not ready.done():
                    told = f"RabbitMQ does not let this user consume {self.queue}: {exc}. Give it the right to read"
                    ready.set_exception(ConfigurationError(f"{told} (rabbitmqctl set_permissions)"))
                    return
                self._refused(exc)
                await asyncio.sleep(_PAUSE_SECONDS)
            except LOST as exc:
                if _HELD_TOO_LONG in str(exc):
                    log.warning("%s: %s", self.queue, _TOO_LONG)
                log.debug("the consumer of %s is lost and made anew: %s", self.queue, exc)
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _begin(self) -> tuple[Session, "asyncio.Future[None]"]:
        channel = await self._link.channel(BatchChannel)
        session = Session(channel, ordered=self._ordered, changed=self._changed.set)
        lost = channel.closing
        lost.add_done_callback(lambda _: self._lost(session))
        channel.on_consumer_cancel_callbacks.add(lambda _: self._lost(session))
        channel.incoming.delivered = lambda message: self._arrived(session, message)
        self._held_back = []
        self._session = session
        await channel.basic_qos(prefetch_count=self._prefetch)
        await channel.basic_consume(self.queue, _unused)
        self._is_refused = False
        return session, lost

    def _lost(self, session: Session) -> None:
        session.lost = True
        session.quiet.set()
        self._changed.set()

    async def _until_over(self, session: Session, lost: "asyncio.Future[None]") -> None:
        """Until it is lost, or has to be closed and nothing of it is out."""
        while not session.lost and not self._closed:
            if self._paused or session.recycled:
                await session.quiet.wait()
                if self._paused or session.recycled:
                    return
            self._changed.clear()
            await self._changed.wait()
        if lost.done() and (error := lost.exception()) is not None:
            raise error

    async def _declare_again(self) -> None:
        try:
            channel = await self._link.channel(BatchChannel)
            await self._declare(channel)
            await channel.close()
        except ConfigurationError as exc:  # somebody may mend that
            self._refused(exc)
        except LOST as exc:
            log.debug("%s could not be declared anew: %s", self.queue, exc)
        await asyncio.sleep(_PAUSE_SECONDS)

    def _refused(self, exc: Exception) -> None:
        """Said once, until it is consumed again."""
        if not self._is_refused:
            log.error("%s cannot be consumed, which is tried again and again: %s", self.queue, exc)
        self._is_refused = True

    def _arrived(self, session: Session, message: Arrived) -> None:
        if session.lost:
            return
        session.arrived(message.delivery_tag)
        if self._paused or session.recycled or self._closed:
            self._held_back.append(message)
        else:
            session.hand_out()
            self._take(session, message)


async def _unused(message: object) -> None:
    """Deliveries do not come this way (`frames.py`)."""
    raise AssertionError(message)


def stale(what: object) -> StaleLock:
    return StaleLock(f"{what} is no longer held here: it has ended, or its channel is lost; RabbitMQ delivers it again")
