"""The number of partitions changes while instances run and messages come: none is lost, doubled or out of order."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.ids import slot_of
from faregate.message import Envelope
from faregate.ports.queue import Binding
from faregate.ports.schemes import open_store
from faregate.ports.store import NEXT, REPARTITION, Parked
from faregate.stores.sqlite.transaction import SqliteTransaction
from faregate.transports.rabbitmq import RabbitmqQueue
from faregate.transports.rabbitmq import repartition as changing
from faregate.transports.rabbitmq.channels import Publication
from faregate.transports.rabbitmq.migration import claim_for_ever
from faregate.transports.rabbitmq.names import FENCE, TO
from faregate.transports.rabbitmq.survey import SeenQueue
from faregate.transports.rabbitmq.topology import partition_queues, routes_of
from tests.rabbitmq.rig import remove_queues
from tests.rabbitmq.site import Site, in_order, step
from tests.rabbitmq.test_operations import only_letter, publish_plainly

pytestmark = pytest.mark.services

Patch = pytest.MonkeyPatch
MESSAGES = 210


async def change(site: Site, to: int) -> None:
    """As the command does it, and in this event loop."""
    bus = site.bus()
    store, transport = bus.store_of(site.name), RabbitmqQueue(site.broker)
    assert store is not None
    await store.open()
    await transport.open()
    [binding] = bus.bindings
    try:
        assert await changing.repartition(transport, binding, store, to, lambda what, count: None)
    finally:
        await transport.close()
        await store.close()


async def test_partitions_change_while_instances_run(site: Site, monkeypatch: Patch) -> None:
    """The programs of the two say different numbers, and some messages wait for a later try all the time."""

    async def publish() -> None:
        async with fg.Bus(site.broker, nodes=[fg.Node(site.author)]) as author:
            for number in range(MESSAGES):
                await author.publish(step(number, 3 if number % 30 == 0 else 0))
                await asyncio.sleep(0.03)

    async with site.bus(4) as one, site.bus(6) as other:
        publishing = asyncio.create_task(publish())
        await site.until_seen(20)
        status, told = await site.run(monkeypatch, "repartition", "--to", "6")
        assert (status, told["changed"]) == (0, True)
        await publishing
        await site.until_seen(MESSAGES)
        for bus in (one, other):
            await bus.idle()
            assert isinstance(bus.transport, RabbitmqQueue)
            assert await bus.transport.partitions(site.queue) == [f"{site.queue}.g2-{number}" for number in range(6)]
    assert site.seen() == in_order(MESSAGES)
    assert site.parked() == 0
    assert not [name for name in await site.left() if ".g1-" in name]


async def test_what_waited_is_handled_before_what_comes_meanwhile(site: Site, monkeypatch: Patch) -> None:
    async with site.bus() as bus:
        await bus.pause(site.name, "Step")
        await site.publish_more(0, 21)
        take_over = changing._Change._take_over

        async def meanwhile(self: Any, *given: Any) -> None:
            await bus.resume(site.name, "Step")
            await site.publish_more(21, 42)
            await take_over(self, *given)

        monkeypatch.setattr(changing._Change, "_take_over", meanwhile)
        await change(site, 6)
        await site.until_seen(42)
        await bus.idle()
    assert site.seen() == in_order(42)


async def test_an_instance_that_binds_the_earlier_queues_late_does_no_harm(site: Site, monkeypatch: Patch) -> None:
    await site.bus().prepare()
    await site.publish_more(0, 21)
    what_is_parked = changing._Parking.what_is_parked

    async def meanwhile(self: Any) -> int:
        """Some come to the new queues alone, and some to both."""
        await site.publish_more(21, 42)
        late = RabbitmqQueue(site.broker)
        await late.open()
        await late.bind(site.bus().bindings[0])
        await late.close()
        await site.publish_more(42, 63)
        return await what_is_parked(self)

    monkeypatch.setattr(changing._Parking, "what_is_parked", meanwhile)
    await change(site, 6)
    assert await site.effects(63) == in_order(63)
    assert not [name for name in await site.left() if ".g1-" in name]


async def test_a_queue_that_somebody_removed_hides_no_other_one(site: Site, monkeypatch: Patch) -> None:
    await site.bus().prepare()
    transport = RabbitmqQueue(site.broker)
    await transport.open()
    await remove_queues(transport, f"{site.queue}.g1-1")
    await transport.close()
    accounts = {f"account-{each}" for each in range(7) if int(slot_of(f"account-{each}")) % 4 != 1}
    assert 0 < len(accounts) < 7
    await site.publish(21)
    status, told = await site.run(monkeypatch, "doctor")
    assert status == 1
    assert f"{site.queue}.g1-1" in [each["queue"] for part in told["subscriptions"] for each in part["findings"]]
    await change(site, 6)
    kept = {account: numbers for account, numbers in in_order(21).items() if account in accounts}
    assert await site.effects(3 * len(accounts)) == kept
    assert not [name for name in await site.left() if ".g1-" in name]


def test_every_slot_leads_to_one_partition_and_what_has_none_to_the_first() -> None:
    binding = Binding(node="shop", type="Step", kind="command", partitions=3)
    names = partition_queues(binding)
    routes = [(key.rpartition(".")[2], queue) for queue, exchange, key in routes_of(binding) if exchange == TO]
    assert len(routes) == 257 and len(list(routes_of(binding))) == 2 * 257
    assert dict(routes) == {str(slot): names[slot % 3] for slot in range(256)} | {"-": names[0]}
    assert [key for *_, key in routes_of(replace(binding, partitions=1))] == ["command.shop.Step.*", "shop.Step.*"]


async def test_what_is_parked_for_another_subscription_to_the_type_stays(tmp_path: Path) -> None:
    """A command, and an event of the same name from a node whose name begins as generations do."""
    gift = Binding(node="shop", type="Step", kind="event", source="gift", partitions=4)
    command = Binding(node="shop", type="Step", kind="command", partitions=6, generation=2)
    names, transport = partition_queues(command), RabbitmqQueue("amqp://127.0.0.1/")
    assert partition_queues(gift)[0] == "shop.Step.gift.g1-0"
    store = open_store(f"sqlite:{tmp_path}/shop.db", transport.clock)
    await store.open()
    epochs = {name: await claim_for_ever(store, "shop", name, REPARTITION) or 0 for name in names}
    rows = [
        Parked(str(uuid.uuid4()), 5.0, 0, None, NEXT, Envelope(type="Step", publication_id=queue), queue)
        for queue in ("shop.Step.gift.g1-0", "shop.Step.g1-3")
    ]
    async with store.transaction() as transaction:
        await transaction.park("shop", [(row, None) for row in rows])
    assert await changing._Parking(command, names, epochs, store, transport).what_is_parked() == 1
    async with store.transaction() as transaction:
        found = {row.envelope.publication_id: row.queue for row in await transaction.parked("shop")}
    assert found == {"shop.Step.gift.g1-0": "shop.Step.gift.g1-0", "shop.Step.g1-3": "shop.Step.g2-0"}
    await store.close()


async def test_a_queue_whose_fence_does_not_come_is_not_taken_for_done(site: Site, monkeypatch: Patch) -> None:
    """As of a broker that says for a moment that nothing waits."""
    await site.bus().prepare()
    await site.publish(21)
    with monkeypatch.context() as mistaken:
        take_out = changing.take_out

        async def sees_nothing(*given: Any) -> int:
            transport, name, move, _, until = given
            return await take_out(transport, name, move, lambda: asyncio.sleep(0, SeenQueue(name, "left over")), until)

        mistaken.setattr(changing, "take_out", sees_nothing)
        with pytest.raises(fg.BrokerUnavailable, match="run this again"):
            await change(site, 6)
    await change(site, 6)
    assert await site.effects(21) == in_order(21)


@pytest.mark.parametrize("partitions", [1, 4])
async def test_what_waits_without_its_slot_is_a_dead_letter_where_it_was_one(site: Site, partitions: int) -> None:
    site.partitions = partitions
    await site.bus().prepare()
    await publish_plainly(site)
    await site.publish(7)
    await change(site, 6)
    site.partitions = 6
    if partitions == 1:
        assert await site.effects(8) == in_order(7) | {"plain": [7]}
    else:
        assert await site.effects(7) == in_order(7)
        letter = await only_letter(site)
        assert (letter.reason, letter.queue) == ("no-slot", site.queue)


# --- break it on purpose ------------------------------------------------------------------------------------------


def lets_the_new_be_consumed_before_the_old_is_done(patch: Patch, site: Site) -> None:
    take_over = changing._Change._take_over

    async def mutant(self: Any, earlier: Any, epochs: dict[str, int]) -> None:
        for name, epoch in epochs.items():
            await self._store.release_lease(site.name, name, REPARTITION, epoch, 0)
        await site.until_seen(1)
        await take_over(self, earlier, epochs)

    async def whoever_it_is(self: SqliteTransaction, *given: object) -> None:
        pass

    patch.setattr(changing._Change, "_take_over", mutant)
    patch.setattr(SqliteTransaction, "hold_lease", whoever_it_is)


def puts_the_fence_behind_what_comes_late(patch: Patch, site: Site) -> None:
    put, take_out = RabbitmqQueue.put, changing._Change._take_out
    fences: dict[str, Publication] = {}

    async def keeps_fences(self: RabbitmqQueue, publications: Sequence[Publication]) -> None:
        if all(each.properties.message_type != FENCE for each in publications):
            await put(self, publications)
        fences.update({each.routing_key: each for each in publications if each.properties.message_type == FENCE})

    async def puts_it_late(self: Any, name: str, *given: Any) -> int:
        if name in fences:
            await put(self._transport, [fences.pop(name)])
        return await take_out(self, name, *given)

    patch.setattr(RabbitmqQueue, "put", keeps_fences)
    patch.setattr(changing._Change, "_take_out", puts_it_late)


FOUND: list[tuple[Callable[[Patch, Site], None], Callable[..., Awaitable[None]]]] = [
    (lets_the_new_be_consumed_before_the_old_is_done, test_what_waited_is_handled_before_what_comes_meanwhile),
    (puts_the_fence_behind_what_comes_late, test_an_instance_that_binds_the_earlier_queues_late_does_no_harm),
]


@pytest.mark.parametrize(("mutation", "test"), FOUND, ids=[mutation.__name__ for mutation, _ in FOUND])
async def test_the_rule_is_missed(
    site: Site,
    monkeypatch: Patch,
    mutation: Callable[[Patch, Site], None],
    test: Callable[..., Awaitable[None]],
) -> None:
    mutation(monkeypatch, site)
    with pytest.raises(AssertionError):
        await test(site, monkeypatch)
    seen = site.seen()
    assert any(numbers != sorted(numbers) for numbers in seen.values()), "it failed for another reason"
