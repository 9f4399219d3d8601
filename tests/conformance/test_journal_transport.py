"""The `journal:` transport keeps every promise of the queue port."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

import faregate as fg
from faregate.testing import journal_subject, queue_cases, run_queue_case
from faregate.transports.journal import JournalTransport


@pytest.mark.parametrize("name", queue_cases(JournalTransport.capabilities))
async def test_the_journal_transport(name: str, tmp_path: Path) -> None:
    await run_queue_case(name, partial(journal_subject, tmp_path / "journal"))


async def test_opening_and_closing_without_use_forgets_nothing(tmp_path: Path) -> None:
    class Noted(fg.Event):
        text: str

    seen: list[str] = []
    author, reader = fg.Node("author"), fg.Node("reader")

    @reader.on(Noted, source="author")
    async def read(noted: Noted) -> None:
        seen.append(noted.text)

    url = f"journal:{tmp_path}/journal"
    await fg.Bus(url, nodes=[author, reader]).prepare()
    async with fg.Bus(url, nodes=[author]) as bus:
        await bus.publish(Noted(text="kept"), node="author")
    await fg.Bus(url, nodes=[author]).prepare()
    await fg.Bus(url, nodes=[fg.Node("stranger")]).prepare()
    async with fg.Bus(url, nodes=[fg.Node("stranger")]):
        pass
    async with fg.Bus(url, nodes=[author, reader]) as bus:
        await bus.idle()
    assert seen == ["kept"]


async def test_what_is_done_between_waiting_messages_stays_done_over_many_openings(tmp_path: Path) -> None:
    class Noted(fg.Event):
        number: int

    url = f"journal:{tmp_path}/journal"
    author = fg.Node("author")
    done: list[int] = []
    half = asyncio.Event()

    def reader(*, only_odd: bool) -> fg.Node:
        node = fg.Node("reader")

        @node.on(Noted, source="author", retry=None, redeliver=fg.Redeliver(3600))
        async def read(noted: Noted) -> None:
            if only_odd and not noted.number % 2:
                raise fg.RetryAfter(0.05)
            done.append(noted.number)
            if len(done) == 50:
                half.set()

        return node

    async with fg.Bus(url, nodes=[author, reader(only_odd=True)]) as bus:
        await bus.publish_many([Noted(number=number) for number in range(100)], node="author")
        await asyncio.wait_for(half.wait(), 30)
    for _ in range(3):
        async with fg.Bus(url, nodes=[author]) as bus:
            await bus.publish(Noted(number=1000), node="author", idempotency_key="last")
    async with fg.Bus(url, nodes=[author, reader(only_odd=False)]) as bus:
        await bus.idle()
    assert sorted(done) == [*range(100), 1000], "a handled message came back, or a waiting one did not"
