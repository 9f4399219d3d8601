"""Work that has to end does, also if something passes over the first cancellation."""

import asyncio

import pytest

from faregate.ports import cancellation
from faregate.ports.cancellation import end


async def test_a_task_that_passes_over_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation, "_AGAIN_SECONDS", 0.001)
    passed_over = 0
    started = asyncio.Event()

    async def stubborn() -> None:
        nonlocal passed_over
        while True:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                passed_over += 1
                if passed_over == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await started.wait()
    async with asyncio.timeout(10):
        await end(task)
    assert task.cancelled() and passed_over == 3


async def test_a_task_that_failed_is_over_and_no_task_is_none() -> None:
    async def fail() -> None:
        raise OSError("no")

    task = asyncio.create_task(fail())
    await asyncio.wait({task})
    await end(task)
    await end(None)
    assert task.done()
