"""The `journal:` transport keeps every promise of the queue port."""

from functools import partial
from pathlib import Path

import pytest

import faregate as fg
from faregate.testing import QUEUE_CASES, journal_subject, run_queue_case


@pytest.mark.parametrize("name", QUEUE_CASES)
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
