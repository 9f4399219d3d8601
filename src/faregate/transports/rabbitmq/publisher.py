"""Publishes with confirms, in order, over one channel.

Rules kept here:
- Batches go out in the order in which they were handed in. What was not confirmed when a channel is lost goes out again
  on the next one, before anything newer: recipients recognise the repetition by its id.
- What the broker refuses, because a queue is full or has no leader, goes out again until its time is over; and nothing
  else does, or copies would fill the queue. Other queues may have taken it. Nothing newer of its keys goes out before
  it, but for what was on its way already.
- A channel that goes on refusing is exchanged for a new one, at growing intervals, once all that is on its way is
  answered: after a queue lost its leader, RabbitMQ 3.10 may refuse on the channels of that moment for ever.
- Whoever publishes waits for the broker's answer, and not longer than `confirm=`. Then it is `BrokerUnavailable` where
  nothing was sent, and `OutcomeUnknown` where the answer is missing.
- A command that no queue takes is `Unroutable`. An event may have no recipient.
"""

import asyncio
import logging
import re
from bisect import insort
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import count
from operator import attrgetter

from aiormq.exceptions import ChannelAccessRefused, ChannelNotFoundEntity, ChannelPreconditionFailed

from faregate.errors import BrokerUnavailable, ConfigurationError, FaregateError, MessageTooLarge, OutcomeUnknown
from faregate.ports.cancellation import end
from faregate.transports.rabbitmq.channels import BatchChannel, Confirmation, Publication
from faregate.transports.rabbitmq.link import LOST, Link, how_lost, not_cancelled
from faregate.transports.rabbitmq.names import EXCHANGE, TO

log = logging.getLogger("faregate.rabbitmq")

_AT_ONCE_BYTES = 1 << 20
"""What goes out with one write, about."""
_REFUSED_SECONDS = 0.5
_FIRST_PATIENCE, _LONGEST_PATIENCE = 2.0, 60.0
"""For how many seconds a channel may refuse."""
_ANSWER_SECONDS = 5.0
"""For how long the answers are waited for before a channel is exchanged."""
_NO_EXCHANGE = re.compile(r"no exchange '([^']*)'")
_TOO_LARGE = re.compile(r"message size (\d+) .*max(?:imum)? size (\d+)")


class Publisher:
    def __init__(self, link: Link, declare: Callable[[BatchChannel], Awaitable[None]], seconds: float) -> None:
        """`declare` makes sure of the exchanges whenever there is a new channel."""
        self._link = link
        self._declare = declare
        self._seconds = seconds
        self._waiting: deque[Confirmation] = deque()
        """To be written."""
        self._written: deque[Confirmation] = deque()
        """On their way, in order; the first ones may be done."""
        self._resting: Counter[str] = Counter()
        """The routing keys of what was refused, and goes out again in a moment."""
        self._numbers = count()
        self._patience = Patience()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        await end(self._task)

    async def publish(self, publications: Sequence[Publication]) -> dict[int, str]:
        """Once the broker has answered for all of them: the places of those that no queue takes, and what it says.
        Raises `BrokerUnavailable`, `OutcomeUnknown`."""
        batch = Confirmation(publications, next(self._numbers))
        places: Sequence[int] = range(len(publications))
        returned: dict[int, str] = {}
        self._waiting.append(batch)
        self._wake.set()
        try:
            async with asyncio.timeout(self._seconds):
                await batch.done
                while batch.refused:  # a queue is full, or has no leader for a moment
                    returned |= {places[place]: text for place, text in batch.returned.items()}
                    places = [places[place] for place in sorted(batch.refused)]
                    batch = Confirmation([publications[place] for place in places], batch.number)
                    self._patience.refused()
                    await self._rest(batch)
                    insort(self._waiting, batch, key=_number)
                    await batch.done
        except TimeoutError:
            raise self._missing(batch, isinstance(places, list)) from None
        finally:
            batch.done.cancel()
        return returned | {places[place]: text for place, text in batch.returned.items()}

    async def _rest(self, batch: Confirmation) -> None:
        keys = Counter(_keys(batch))
        self._resting += keys
        try:
            await asyncio.sleep(_REFUSED_SECONDS)
        finally:
            self._resting -= keys
            self._wake.set()

    def _missing(self, batch: Confirmation, refused: bool) -> FaregateError:
        what = f"RabbitMQ did not confirm it within {self._seconds:g} s"
        if refused:
            return OutcomeUnknown(
                f"{what} and refuses it: a queue that it goes to is full or has no leader. Other queues may have it; "
                "publish it again under its id"
            )
        if batch.first:
            return OutcomeUnknown(f"{what}: whether it took the message is unknown; publish it again under its id")
        return BrokerUnavailable(f"{what}, and nothing was sent: it is away, or takes no publications now")

    # --- the task --------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            channel = None
            try:
                with not_cancelled():
                    channel = await self._link.channel(BatchChannel, confirms=True)
                    await self._declare(channel)
                    self._patience.begin()
                    await self._publish_on(channel)
            except LOST as exc:
                self._lost(exc)
            except ConfigurationError as exc:
                self._fail(exc)
                await asyncio.sleep(_REFUSED_SECONDS)
            except Exception as exc:
                log.critical("an unexpected error while publishing; it goes on", exc_info=True)
                self._fail(OutcomeUnknown(f"publishing failed: {type(exc).__name__}: {exc}"))
            finally:
                if channel is not None:
                    with suppress(*LOST):
                        await channel.close()
            again = [batch for batch in self._written if not batch.done.done()]
            self._written.clear()
            self._waiting = deque(sorted([*again, *self._waiting], key=_number))

    async def _publish_on(self, channel: BatchChannel) -> None:
        """Write what comes, until the channel is lost: then raise how. Or until it is to be exchanged."""
        lost = channel.closing
        lost.add_done_callback(lambda _: self._wake.set())
        while not lost.done():
            self._wake.clear()
            if self._patience.is_over:
                await self._answered(lost)
                return
            unblocked = asyncio.ensure_future(self._link.unblocked())
            await asyncio.wait((unblocked, lost), return_when=asyncio.FIRST_COMPLETED)
            unblocked.cancel()
            while not lost.done() and (batches := self._next()):
                self._written += batches
                await channel.publish_all(batches)
            await self._wake.wait()
        raise how_lost(lost)

    async def _answered(self, lost: asyncio.Future[None]) -> None:
        """Return once nothing is on its way; what gets no answer goes out again on the next channel."""
        log.warning("RabbitMQ goes on refusing publications: on a new channel it may know the leaders of its queues")
        on_their_way = [batch.done for batch in self._written if not batch.done.done()]
        if on_their_way:
            answered = asyncio.gather(*on_their_way, return_exceptions=True)
            await asyncio.wait((answered, lost), timeout=_ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    def _next(self) -> list[Confirmation]:
        """What goes out with the next write; nothing that its publisher stopped waiting for."""
        written = self._written
        while written and written[0].done.done():
            written.popleft()
        batches: list[Confirmation] = []
        held_back: list[Confirmation] = []
        keys = set(self._resting)
        size = 0
        while self._waiting and size < _AT_ONCE_BYTES:
            batch = self._waiting.popleft()
            if batch.done.done():
                continue
            if keys and not keys.isdisjoint(_keys(batch)):
                held_back.append(batch)
                keys |= _keys(batch)
            else:
                batches.append(batch)
                size += sum(len(publication.body) for publication in batch.publications)
        self._waiting.extendleft(reversed(held_back))
        return batches

    def _lost(self, exc: BaseException) -> None:
        """The channel is gone. If that is because of what we sent, sending it again would not help."""
        if isinstance(exc, ChannelPreconditionFailed) and (found := _TOO_LARGE.search(str(exc))):
            size, limit = map(int, found.groups())
            text = f"the message has {size} bytes, and this RabbitMQ takes {limit} at most (max_message_size)"
            for batch in self._written:
                if any(len(publication.body) == size for publication in batch.publications):
                    _end(batch, MessageTooLarge(text))
        elif isinstance(exc, ChannelAccessRefused):
            self._fail(ConfigurationError(f"RabbitMQ does not let this user publish: {exc}"))
        elif isinstance(exc, ChannelNotFoundEntity):
            log.error(
                "somebody deleted an exchange: %s. It is declared anew, without the bindings that led from it to "
                "queues: start all nodes again, or their events have no recipients",
                exc,
            )
            gone = _NO_EXCHANGE.search(str(exc))
            for batch in self._written:
                others = {publication.exchange for publication in batch.publications} - {EXCHANGE, TO}
                if gone is not None and gone[1] in others:  # whoever needs it declares it
                    _end(batch, BrokerUnavailable(f"the exchange {gone[1]} is gone"))
        else:
            log.debug("the channel for publishing is lost: %s", exc)

    def _fail(self, exc: FaregateError) -> None:
        for batch in (*self._written, *self._waiting):
            _end(batch, exc)


class Patience:
    """With the channel at hand: for how long it may go on refusing."""

    def __init__(self) -> None:
        self._seconds = _FIRST_PATIENCE
        self._since = self._last = self._over_at = float("-inf")
        self.is_over = False

    def begin(self) -> None:
        """With a new channel."""
        self._last, self.is_over = float("-inf"), False

    def refused(self) -> None:
        now = asyncio.get_running_loop().time()
        if now > self._last + 4 * _REFUSED_SECONDS:
            self._since = now
        self._last = now
        if now >= self._since + self._seconds and not self.is_over:
            self.is_over = True
            lately = now < self._over_at + 2 * _LONGEST_PATIENCE
            self._seconds = min(2 * self._seconds, _LONGEST_PATIENCE) if lately else 2 * _FIRST_PATIENCE
            self._over_at = now


_number = attrgetter("number")


def _keys(batch: Confirmation) -> set[str]:
    """Those that stand for an ordering key: they end in its slot."""
    return {each.routing_key for each in batch.publications if not each.routing_key.endswith(".-")}


def _end(batch: Confirmation, exc: FaregateError) -> None:
    if not batch.done.done():
        batch.done.set_exception(exc)
