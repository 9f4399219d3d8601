"""Several keys on a real RabbitMQ: one single-active queue, lanes inside, and what waits is in the store."""

import asyncio
import uuid
from collections import defaultdict
from pathlib import Path

import pytest

import faregate as fg
from tests.rabbitmq.rig import remove_queues

pytestmark = pytest.mark.services
LONG = 120  # seconds until a test that hangs is failed


class Transfer(fg.Event):
    debit: str
    credit: str
    number: int


async def test_transfers_keep_the_order_of_both_accounts_while_one_waits_for_its_later_try(
    broker: str, tmp_path: Path
) -> None:
    world, bank = (fg.Node(f"{name}-{uuid.uuid4().hex[:8]}") for name in ("world", "bank"))
    began: dict[str, list[int]] = defaultdict(list)
    handled: list[int] = []
    failed, done = asyncio.Event(), asyncio.Event()
    together = asyncio.Barrier(2)

    @bank.on(Transfer, source=world.name, key=fg.Each("debit", "credit"), retry=None, redeliver=fg.Redeliver(0.5))
    async def book(transfer: Transfer, ctx: fg.Context) -> None:
        for account in ctx.keys:
            began[account].append(transfer.number)
        if transfer.number == 0 and not failed.is_set():
            failed.set()
            raise RuntimeError("on purpose")
        if transfer.number in (5, 6):
            await together.wait()  # e to f and g to h run at the same time
        handled.append(transfer.number)
        if len(handled) == len(sent):
            done.set()

    pairs = ["ab", "bc", "ca", "cd", "da", "ef", "gh", *["ab", "ba", "bd"] * 8]
    sent = [Transfer(debit=pair[0], credit=pair[1], number=number) for number, pair in enumerate(pairs)]
    async with fg.Bus(broker, nodes=[world, bank], store=f"sqlite:{tmp_path}/bank.db") as bus:
        [worker] = bus._workers
        assert worker.binding.partitions == 1
        async with asyncio.timeout(LONG):
            await bus.publish(sent[0], node=world)
            await failed.wait()
            for each in sent[1:]:
                await bus.publish(each, node=world)
            await done.wait()
        await remove_queues(bus.transport)
    assert sorted(handled) == list(range(len(sent)))
    for account, numbers in began.items():
        own = [each.number for each in sent if account in (each.debit, each.credit)]
        assert numbers == ([0, *own] if account in "ab" else own)
