"""What wakes the event loop when the commit thread has something to tell."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from faregate.broker.journal.bell import Bell
from faregate.broker.journal.items import Call
from faregate.broker.journal.journal import Journal
from tests.core.rig import LONG


async def test_it_is_answered_in_the_event_loop_however_often_it_was_rung() -> None:
    answered = asyncio.Event()
    threads: set[int] = set()

    def answer() -> None:
        threads.add(threading.get_ident())
        answered.set()

    bell = Bell(asyncio.get_running_loop(), answer)
    try:
        for rings in (1, 100_000, 1):  # more than a pipe takes
            answered.clear()
            ringing = threading.Thread(target=lambda rings=rings: [bell.ring() for _ in range(rings)])
            ringing.start()
            ringing.join()
            async with asyncio.timeout(LONG):
                await answered.wait()
        assert threads == {threading.get_ident()}
    finally:
        bell.close()


async def test_whoever_fails_when_he_is_told_does_not_keep_the_others_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path)
    journal.start()
    told: list[int] = []
    all_told = asyncio.Event()

    def done(_: Sequence[int], error: BaseException | None) -> None:
        told.append(len(told))
        if len(told) == 4:
            all_told.set()
        raise RuntimeError("he who is told fails")

    for _ in range(4):
        journal._results.append(([], [(Call(lambda: None, done), (), None)]))
    assert journal._bell is not None
    journal._bell.ring()
    async with asyncio.timeout(LONG):
        await all_told.wait()
    await journal.barrier()
    await journal.close(None)
    assert caplog.text.count("RuntimeError: he who is told fails") == 4
