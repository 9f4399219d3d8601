"""Steps of many accounts, published in order for a fleet, and how far it has come with them.

Rules kept here:
- A step of an account is published when the one before is confirmed. What may have been sent, and was not confirmed, is
  published again as the same publication; what was not sent is published as if for the first time.
- Publishers keep no more than `ahead` in front of the fleet, so that both are at work whenever something happens.
- Nobody waits for a clock: a test waits for effects, and fails when none comes for minutes.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psycopg

import faregate as fg
from tests.rabbitmq.fleet import Fleet
from tests.rabbitmq.instance import Step
from tests.rabbitmq.judge import Effect, judge

_LOOK_SECONDS = 0.3
_PATIENCE_SECONDS = 240.0
_REST_SECONDS = 1.0
"""Anything doubled would come by then."""
_FAILS = 509
"""One of so many fails at first, and one of twice as many twice."""


class Load:
    def __init__(self, fleet: Fleet, *, accounts: int, publishers: int, ahead: int) -> None:
        self._fleet = fleet
        self._accounts = [f"account-{number}" for number in range(accounts)]
        self._publishers = publishers
        self._ahead = ahead
        self._over = False
        self.published: dict[str, Step] = {}
        self.handled = 0
        self.refused = 0
        """How often publishing raised."""
        self._looked = asyncio.Condition()
        self._places = itertools.count(1)

    @asynccontextmanager
    async def running(self, broker: str) -> AsyncIterator[None]:
        """Publishes within the block; afterwards waits until all of it is handled."""
        following = asyncio.create_task(self._follow())
        try:
            async with fg.Bus(broker, nodes=[self._fleet.author]) as bus:
                shares = [self._accounts[first :: self._publishers] for first in range(self._publishers)]
                publishing = asyncio.gather(*(self._publish(bus, share) for share in shares))
                try:
                    yield
                    self._over = True
                    await publishing
                finally:
                    publishing.cancel()
            await self.until(lambda: self.handled >= len(self.published))
        finally:
            following.cancel()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Look whenever the effects were counted."""
        loop = asyncio.get_running_loop()
        before, since = self.handled, loop.time()
        while not is_so():
            async with self._looked:
                await self._looked.wait()
            if self.handled != before:
                before, since = self.handled, loop.time()
            assert loop.time() < since + _PATIENCE_SECONDS, (
                f"nothing was handled for {_PATIENCE_SECONDS:g} s: {self.handled} of {len(self.published)}"
            )

    async def until_at_least(self, effects: int) -> None:
        await self.until(lambda: self.handled >= effects)

    async def until_more(self, effects: int) -> None:
        await self.until_at_least(self.handled + effects)

    async def until_refused(self) -> None:
        before = self.refused
        await self.until(lambda: self.refused > before)

    async def verdict(self) -> list[str]:
        """What is wrong."""
        await asyncio.sleep(_REST_SECONDS)
        async with await psycopg.AsyncConnection.connect(self._fleet.store, autocommit=True) as connection:
            rows = await connection.execute("select account, number, tries, publication from effects order by at")
            found = judge(self.published, [Effect(*row) for row in await rows.fetchall()])
            dead = await (await connection.execute("select reason, count(*) from faregate_dead group by 1")).fetchall()
        return found + [f"{count} dead: {reason}" for reason, count in dead]

    # --- at work ---------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        async with await psycopg.AsyncConnection.connect(self._fleet.store, autocommit=True) as connection:
            while True:
                row = await (await connection.execute("select count(*) from effects")).fetchone()
                assert row is not None
                self.handled = row[0]
                async with self._looked:
                    self._looked.notify_all()
                await asyncio.sleep(_LOOK_SECONDS)

    async def _publish(self, bus: fg.Bus, accounts: list[str]) -> None:
        for number in itertools.count():
            await self.until(lambda: self._over or len(self.published) - self.handled < self._ahead)
            if self._over:
                return
            steps = [Step(account=account, number=number, fails=self._fails()) for account in accounts]
            self.published |= zip(await self._confirmed(bus, steps), steps, strict=True)

    def _fails(self) -> int:
        place = next(self._places)
        return 0 if place % _FAILS else 1 + (place // _FAILS) % 2

    async def _confirmed(self, bus: fg.Bus, steps: list[Step]) -> list[str]:
        while True:
            try:
                return await bus.publish_many(steps, node=self._fleet.author)
            except fg.BrokerUnavailable as exc:
                self.refused += 1
                await asyncio.sleep(min(exc.retry_after, _LOOK_SECONDS))
            except fg.OutcomeUnknown as exc:
                self.refused += 1
                return [await self._confirmed_again(bus, publication) for publication in exc.publications]

    async def _confirmed_again(self, bus: fg.Bus, publication: object) -> str:
        while True:
            try:
                return await bus.publish(publication)
            except (fg.BrokerUnavailable, fg.OutcomeUnknown) as exc:
                self.refused += 1
                await asyncio.sleep(_LOOK_SECONDS if isinstance(exc, fg.BreakerOpen) else 0)
