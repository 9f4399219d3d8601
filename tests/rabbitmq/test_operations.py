"""Looking after what is on the broker: generations, and `faregate rabbitmq doctor | migrate | repartition`."""

import asyncio
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from pamqp.commands import Basic

import faregate as fg
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Partitioned
from faregate.stores.sqlite import SqliteStore
from faregate.transports.rabbitmq import RabbitmqQueue
from faregate.transports.rabbitmq.channels import BatchChannel
from tests.rabbitmq.rig import remove_queues
from tests.rabbitmq.site import Site, in_order

pytestmark = pytest.mark.services


async def declare(broker: str, *queues: str, **options: Any) -> None:
    """Make queues as somebody else would."""

    async def make(channel: BatchChannel) -> None:
        for queue in queues:
            await channel.queue_declare(queue, durable=True, **options)

    transport = RabbitmqQueue(broker)
    await transport.open()
    await transport.on_channel(make)
    await transport.close()


async def purge(broker: str, queue: str) -> None:
    async def empty(channel: BatchChannel) -> None:
        await channel.queue_purge(queue)

    transport = RabbitmqQueue(broker)
    await transport.open()
    await transport.on_channel(empty)
    await transport.close()


def found(told: Any) -> dict[str, tuple[str, str]]:
    """What is to be done, by queue."""
    findings = [each for part in told["subscriptions"] for each in part["findings"]]
    return {each["queue"]: (each["what"], each["mend"]) for each in findings}


async def test_a_bus_finds_the_current_generation_in_the_store(site: Site) -> None:
    await site.bus(4).prepare()
    bus = site.bus(6)
    async with bus:
        assert isinstance(bus.transport, Partitioned)
        queues = await bus.transport.partitions(site.queue)
        assert queues == [f"{site.queue}.g1-{number}" for number in range(4)], "another number without a generation"
        store = bus.store_of(site.name)
        assert store is not None and await store.next_generation(site.name, site.queue, 1, 6)
    later = site.bus(6)
    async with later:
        assert isinstance(later.transport, Partitioned)
        queues = await later.transport.partitions(site.queue)
        assert queues == [f"{site.queue}.g2-{number}" for number in range(6)]
        assert set(queues) < set(await site.left())


async def test_one_part_does_not_keep_the_order_of_several(site: Site) -> None:
    await site.bus(4).prepare()
    with pytest.raises(fg.ConfigurationError, match="would not stay in order"):
        await site.bus(1).prepare()


async def test_the_doctor_finds_what_is_missing_declared_otherwise_and_waiting(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, told = await site.run(monkeypatch, "doctor")
    assert status == 1
    names = [f"{site.queue}.g1-{number}" for number in range(4)]
    assert found(told).keys() == {*names, f"{site.name}-dead"}, "it does not say what is missing, or more"
    assert await site.left() == [], "looking made a queue"
    await declare(site.broker, names[1], arguments={"x-queue-type": "quorum"})
    with pytest.raises(fg.QueueDiffers):
        await site.bus().prepare()
    status, told = await site.run(monkeypatch, "doctor")
    what, mend = found(told)[names[1]]
    assert status == 1 and "declared otherwise" in what and "x-dead-letter" in what
    assert mend == "faregate rabbitmq migrate site_under_test:bus"


async def test_the_doctor_says_who_holds_what_and_what_waits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    await site.bus().prepare()
    await site.publish(14)
    status, told = await site.run(monkeypatch, "doctor")
    queues = told["subscriptions"][0]["queues"]
    assert status == 1 and sum(each["waiting"] for each in queues) == 14
    assert all("nobody consumes" in what for what, _ in found(told).values())
    bus = site.bus()
    async with bus:
        await bus.idle()
        status, told = await site.run(monkeypatch, "doctor")
        assert (status, told["sound"]) == (0, True)
        assert {each["held_by"] for each in told["subscriptions"][0]["queues"]} == {bus.instance}
        assert [each["consumers"] for each in told["subscriptions"][0]["queues"]] == [1] * 4


async def test_pruning_removes_what_is_left_over_and_empty(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = site.bus()
    await bus.prepare()
    await site.publish(1)
    store = bus.store_of(site.name)
    assert store is not None
    await store.open()
    assert await store.next_generation(site.name, site.queue, 1, 4)
    await store.close()
    old = {f"{site.queue}.g1-{number}" for number in range(4)}
    status, told = await site.run(monkeypatch, "doctor")
    assert status == 1 and old < found(told).keys()
    [full] = [queue for queue in old if "1 message waits" in found(told)[queue][0]]
    status, told = await site.run(monkeypatch, "doctor", "--prune", "--yes")
    assert (status, told["removed"]) == (1, []), "a generation with a message went"
    assert full in found(told)
    await purge(site.broker, full)
    status, told = await site.run(monkeypatch, "doctor", "--prune", "--yes")
    assert (status, set(told["removed"])) == (0, old)
    assert set(await site.left()) == {queue.replace(".g1-", ".g2-") for queue in old} | {f"{site.name}-dead"}


async def test_pruning_asks_or_is_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fg.ConfigurationError, match="--yes"):
        await site.run(monkeypatch, "doctor", "--prune")


# --- migrate ---

CLASSIC: dict[str, Any] = {"arguments": {"x-queue-type": "classic"}}
OTHER: dict[str, Any] = {"arguments": {"x-queue-type": "quorum", "x-single-active-consumer": True}}


async def bind(site: Site, queue: str, *keys: str) -> None:
    async def lead(channel: BatchChannel) -> None:
        for key in keys:
            await channel.queue_bind(queue, "faregate", routing_key=f"event.{site.author}.Step.{key}")

    transport = RabbitmqQueue(site.broker)
    await transport.open()
    await transport.on_channel(lead)
    await transport.close()


async def otherwise(site: Site, **options: Any) -> None:
    """The one partition of the node is there, and bound, and not as it should be."""
    await declare(site.broker, f"{site.queue}.g1-0", **options)
    await bind(site, f"{site.queue}.g1-0", "*")


@pytest.mark.parametrize("options", [CLASSIC, OTHER], ids=["classic", "other-arguments"])
async def test_an_ordered_queue_is_made_anew_with_all_messages_in_order(
    site: Site, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    site.partitions = 1
    await otherwise(site, **options)
    await site.publish(500)
    with pytest.raises(fg.QueueDiffers):
        await site.bus().prepare()
    status, told = await site.run(monkeypatch, "migrate")
    assert (status, told["moved"]) == (0, 500)
    await site.publish_more(500, 600)
    assert await site.effects(600) == in_order(600)
    status, told = await site.run(monkeypatch, "migrate")
    assert told["migrated"] == [], "it made something that was right already"
    status, told = await site.run(monkeypatch, "doctor")
    assert (status, told["sound"]) == (0, True)


STEPS = 90
"""More than any of these commands has."""
SOME = (14, 22, 30)


def steps() -> list[Any]:
    """A few in every run, every fourth one in the long tier."""
    return [pytest.param(step, marks=[] if step in SOME else [pytest.mark.full]) for step in range(2, STEPS, 4)]


class Interrupted:
    """Every step of a migration counts; the one after so many fails, and all after that."""

    def __init__(self, step: int) -> None:
        self.left = step

    def before(self, work: Callable[..., Any]) -> Callable[..., Any]:
        async def interrupted(*arguments: Any) -> Any:
            self._count()
            return await work(*arguments)

        return interrupted

    def before_ack(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def interrupted(*arguments: Any) -> Any:
            self._count()
            return work(*arguments)

        return interrupted

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise fg.BrokerUnavailable("interrupted by the test")


async def interrupt(site: Site, monkeypatch: pytest.MonkeyPatch, step: int, *command: str) -> None:
    """Its connection ends with it, as when its process is killed."""
    interrupted = Interrupted(step)
    with monkeypatch.context() as patch, suppress(fg.BrokerUnavailable):
        patch.setattr(RabbitmqQueue, "on_channel", interrupted.before(RabbitmqQueue.on_channel))
        patch.setattr(RabbitmqQueue, "put", interrupted.before(RabbitmqQueue.put))
        for name in ("claim_lease", "next_generation", "release_lease"):
            patch.setattr(SqliteStore, name, interrupted.before(getattr(SqliteStore, name)))
        patch.setattr(BatchChannel, "acknowledgements", interrupted.before_ack(BatchChannel.acknowledgements))
        await site.run(patch, *(command or ("migrate",)))
    assert step < STEPS - 4 or interrupted.left >= 0, f"it has more than {STEPS} steps"


@pytest.mark.parametrize("step", steps())
async def test_a_migration_goes_on_wherever_it_was_interrupted(
    site: Site, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    site.partitions = 1
    await otherwise(site, **OTHER)
    await site.publish(60)
    await interrupt(site, monkeypatch, step)
    await site.publish_more(60, 80)
    await site.run(monkeypatch, "migrate")
    assert await site.effects(80) == in_order(80)


async def test_a_migration_that_only_kept_its_lease_is_finished(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.partitions = 1
    await otherwise(site, **OTHER)
    await site.publish(7)

    async def cut(*_: object) -> None:
        raise fg.StoreUnavailable("interrupted by the test")

    with monkeypatch.context() as patch, pytest.raises(fg.StoreUnavailable):
        patch.setattr(SqliteStore, "release_lease", cut)
        await site.run(patch, "migrate")
    status, told = await site.run(monkeypatch, "doctor")
    assert status == 1 and "nobody may consume" in found(told)[f"{site.queue}.g1-0"][0]
    await site.run(monkeypatch, "migrate")
    assert await site.effects(7) == in_order(7)


@pytest.mark.parametrize("step", steps())
async def test_a_queue_without_order_goes_on_wherever_it_was_interrupted(
    site: Site, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    site.ordered = False
    await declare(site.broker, site.queue, **CLASSIC)
    await bind(site, site.queue, "*")
    await site.publish(60)
    await interrupt(site, monkeypatch, step)
    await site.publish_more(60, 80)
    await site.run(monkeypatch, "migrate")
    found = await site.effects(80)
    assert {account: sorted(numbers) for account, numbers in found.items()} == in_order(80)


async def test_nothing_is_migrated_while_somebody_consumes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.partitions = 1
    await otherwise(site, **OTHER)
    await site.publish(3)
    transport = RabbitmqQueue(site.broker)
    await transport.open()
    consuming, over = asyncio.Event(), asyncio.Event()

    async def consume(channel: BatchChannel) -> None:
        await channel.basic_consume(f"{site.queue}.g1-0", _never)
        consuming.set()
        await over.wait()

    task = asyncio.create_task(transport.on_channel(consume))
    await consuming.wait()
    with pytest.raises(fg.ConfigurationError, match="stop the instances"):
        await site.run(monkeypatch, "migrate")
    over.set()
    await task
    await transport.close()
    status, told = await site.run(monkeypatch, "migrate")
    assert (status, told["moved"]) == (0, 3)


async def _never(message: object) -> None:
    """Nobody acknowledges."""


async def test_nothing_is_migrated_while_an_instance_holds_the_partition(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.partitions = 1
    await otherwise(site, **OTHER)
    await site.publish(3)
    store = site.bus().store_of(site.name)
    assert store is not None
    await store.open()
    assert await store.claim_lease(site.name, f"{site.queue}.g1-0", "another", 1000) == 1
    with pytest.raises(fg.ConfigurationError, match="is held by another for"):
        await site.run(monkeypatch, "migrate")
    await store.release_lease(site.name, f"{site.queue}.g1-0", "another", 1, 0)
    await store.close()
    await site.run(monkeypatch, "migrate")
    assert await site.effects(3) == {f"account-{each}": [each] for each in range(3)}


async def test_what_another_program_published_is_known_by_its_routing_key_afterwards(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.ordered = False
    await declare(site.broker, site.queue, **CLASSIC)
    await bind(site, site.queue, "*")
    await publish_plainly(site)
    await site.run(monkeypatch, "migrate")
    assert await site.effects(1) == {"plain": [7]}


async def publish_plainly(site: Site) -> None:
    async def send(channel: BatchChannel) -> None:
        key, properties = f"event.{site.author}.Step.-", Basic.Properties(message_id=uuid.uuid4().hex)
        await channel.basic_publish(
            b'{"account": "plain", "number": 7}', exchange="faregate", routing_key=key, properties=properties
        )

    transport = RabbitmqQueue(site.broker)
    await transport.open()
    await transport.on_channel(send)
    await transport.close()


async def only_letter(site: Site) -> DeadLetter:
    """Once an instance has taken it into the store."""
    letters: list[DeadLetter] = []
    async with site.bus() as bus, asyncio.timeout(60):
        while not letters:
            await asyncio.sleep(0.05)
            letters = await bus.dead_letters()
    [letter] = letters
    return letter


async def test_what_waits_without_its_slot_is_a_dead_letter_when_its_queue_is_made_anew(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.partitions = 2
    await otherwise(site, **OTHER)
    await publish_plainly(site)
    assert (await site.run(monkeypatch, "migrate"))[0] == 0
    letter = await only_letter(site)
    assert (letter.reason, letter.queue, site.seen()) == ("no-slot", site.queue, {})


async def test_dead_letters_are_kept_when_their_queue_is_made_anew(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    await site.bus().prepare()
    transport = RabbitmqQueue(site.broker)
    await transport.open()
    await remove_queues(transport, f"{site.name}-dead")
    await transport.close()
    await declare(site.broker, f"{site.name}-dead", **CLASSIC)
    await publish_dead(site)
    status, told = await site.run(monkeypatch, "migrate")
    assert (status, told["migrated"], told["moved"]) == (0, [f"{site.name}-dead"], 1)
    bus = site.bus()
    async with bus:
        await bus.idle()
        assert [letter.reason for letter in await bus.dead_letters()] == ["tired"]


async def publish_dead(site: Site) -> None:
    async def send(channel: BatchChannel) -> None:
        headers: dict[str, Any] = {"x-faregate-reason": "tired", "x-faregate-queue": site.queue}
        properties = Basic.Properties(
            message_id=uuid.uuid4().hex, message_type="Step", app_id=site.author, headers=headers
        )
        await channel.basic_publish(b"{}", exchange="", routing_key=f"{site.name}-dead", properties=properties)

    transport = RabbitmqQueue(site.broker)
    await transport.open()
    await transport.on_channel(send)
    await transport.close()


# --- repartition ---


async def test_another_number_of_partitions_keeps_every_message_and_the_order_of_keys(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are handled, some wait for a later try with others parked behind them, and some are in the queues."""
    await site.bus().prepare()
    await site.publish(100)
    async with site.bus(), asyncio.timeout(60):
        await site.publish_more(100, 170, fails=3)
        waiting = 0
        while not waiting:
            await asyncio.sleep(0.01)
            waiting = site.parked()
    assert site.parked(), "nothing waits for a later try"
    await site.publish_more(170, 300)
    status, told = await site.run(monkeypatch, "repartition", "--to", "6")
    assert (status, told["changed"], told["partitions"]) == (0, True, 6)
    assert told["moved"] >= 130, "what was in the queues, at least"
    await site.publish_more(300, 340)
    site.partitions = 6
    assert await site.effects(340) == in_order(340)
    assert site.parked() == 0
    queues = {f"{site.queue}.g2-{number}" for number in range(6)}
    assert set(await site.left()) == queues | {f"{site.name}-dead"}
    assert (await site.run(monkeypatch, "doctor"))[0] == 0
    status, told = await site.run(monkeypatch, "repartition", "--to", "6")
    assert (status, told["changed"]) == (0, False)


@pytest.mark.parametrize("step", steps())
async def test_a_change_of_partitions_goes_on_wherever_it_was_interrupted(
    site: Site, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    site.partitions = 2
    await site.bus().prepare()
    await site.publish(60)
    await interrupt(site, monkeypatch, step, "repartition", "--to", "3")
    await site.publish_more(60, 80)
    await site.run(monkeypatch, "repartition", "--to", "3")
    site.partitions = 3
    assert await site.effects(80) == in_order(80)
