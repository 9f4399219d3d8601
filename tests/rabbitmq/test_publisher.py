"""The publisher on channels that refuse: no broker can be made to do so at will, so they are stand-ins."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from pamqp.commands import Basic

import faregate as fg
from faregate.transports.rabbitmq import publisher as module
from faregate.transports.rabbitmq.channels import Confirmation, Publication
from faregate.transports.rabbitmq.link import Link
from faregate.transports.rabbitmq.publisher import Publisher


class StandIn:
    """A channel that takes everything; or refuses what goes to some routing keys, or says nothing about it."""

    def __init__(self, refuses: str = "", silent: str = "") -> None:
        self.closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.written: list[str] = []
        self.refused = asyncio.Event()
        self._refuses, self._silent = refuses, silent
        self._tags = 0

    async def publish_all(self, batches: Sequence[Confirmation]) -> None:
        for batch in batches:
            batch.begin(self._tags + 1)
            self._tags += len(batch.publications)
            keys = [publication.routing_key for publication in batch.publications]
            self.written += keys
            if self._silent in keys:
                continue
            batch.refused += [place for place, key in enumerate(keys) if key == self._refuses]
            if batch.refused:
                self.refused.set()
            asyncio.get_running_loop().call_soon(_answer, batch.done)

    async def close(self) -> None:
        if not self.closing.done():
            self.closing.set_result(None)


def _answer(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


class StandInLink:
    def __init__(self, channels: list[StandIn]) -> None:
        self.channels = channels
        self.opened = 0

    async def channel(self, cls: type, **options: Any) -> StandIn:
        self.opened += 1
        return self.channels[min(self.opened, len(self.channels)) - 1]

    async def unblocked(self) -> None:
        pass


@pytest.fixture(autouse=True)
def without_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REFUSED_SECONDS", 0.01)
    monkeypatch.setattr(module, "_FIRST_PATIENCE", 0.05)
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.05)


@asynccontextmanager
async def publishing(link: StandInLink, seconds: float = 10.0) -> AsyncIterator[Publisher]:
    async def declare(channel: object) -> None:
        pass

    publisher = Publisher(cast(Link, link), declare, seconds)
    publisher.start()
    try:
        yield publisher
    finally:
        await publisher.close()


def to(key: str) -> list[Publication]:
    return [Publication("faregate", key, Basic.Properties(message_id=key), b"{}")]


async def test_a_channel_that_goes_on_refusing_is_exchanged_for_a_new_one() -> None:
    first, second = StandIn(refuses="event.shop.A.7"), StandIn()
    link = StandInLink([first, second])
    async with publishing(link) as publisher:
        assert await publisher.publish(to("event.shop.A.7")) == {}
    assert first.closing.done()
    assert second.written == ["event.shop.A.7"]
    assert link.opened == 2


async def test_what_gets_no_answer_goes_out_again_when_the_channel_is_exchanged() -> None:
    first, second = StandIn(refuses="event.shop.A.7", silent="event.shop.B.9"), StandIn()
    async with publishing(StandInLink([first, second])) as publisher:
        await asyncio.gather(publisher.publish(to("event.shop.B.9")), publisher.publish(to("event.shop.A.7")))
    assert sorted(second.written) == ["event.shop.A.7", "event.shop.B.9"]


async def test_what_is_refused_once_keeps_its_channel() -> None:
    channel = StandIn(refuses="event.shop.A.7")
    link = StandInLink([channel])
    async with publishing(link) as publisher:
        task = asyncio.create_task(publisher.publish(to("event.shop.A.7")))
        await channel.refused.wait()
        channel._refuses = ""
        assert await task == {}
    assert link.opened == 1


async def test_a_queue_that_stays_full_is_asked_on_few_channels() -> None:
    channels = [StandIn(refuses="event.shop.A.7") for _ in range(50)]
    link = StandInLink(channels)
    async with publishing(link, seconds=1.0) as publisher:
        with pytest.raises(fg.OutcomeUnknown, match="refuses it"):
            await publisher.publish(to("event.shop.A.7"))
    assert 2 <= link.opened <= 6, "the intervals grow"
