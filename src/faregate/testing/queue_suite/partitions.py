"""Cases of the queue suite: what a transport with "partitions" keeps of the order of an ordered binding."""

from typing import cast

from faregate.message import Envelope
from faregate.ports.queue import Binding, Held, Partitioned
from faregate.testing.queue_suite.cases import QUEUE, Inbox, QueueSubject, again, case, event, noted


def in_parts(partitions: int, generation: int = 1) -> Binding:
    return noted(partitions=partitions, generation=generation, key_of=lambda envelope: envelope.key)


async def parted(subject: QueueSubject, partitions: int, generation: int = 1) -> list[str]:
    await subject.transport.bind(in_parts(partitions, generation))
    return await cast(Partitioned, subject.transport).partitions(QUEUE)


def keyed(text: str, key: str | None) -> Envelope:
    return again(event(text), key=key)


def texts(held: list[Held]) -> list[str]:
    return [each.envelope.body.decode() for each in held]


async def settled(subject: QueueSubject, queue: str) -> list[Held]:
    """All that is in a partition, in the order in which it comes."""
    inbox = await Inbox(subject).open(queue, prefetch=100)
    await subject.rest()
    for each in inbox.got:
        each.start()
        await each.settle("handled")
    await inbox.close()
    return inbox.got


@case("partitions")
async def all_messages_of_one_key_are_in_one_partition_in_order(subject: QueueSubject) -> None:
    queues = await parted(subject, 4)
    assert len(queues) == len(set(queues)) == 4, f"a binding with 4 partitions has {queues}"
    keys = [f"key-{number}" for number in range(12)]
    await subject.transport.publish([keyed(f"{key} {number}", key) for number in range(3) for key in keys])
    found = [texts(await settled(subject, queue)) for queue in queues]
    assert sum(map(len, found)) == 36, "not each message is in one partition"
    assert sum(bool(each) for each in found) > 1, "all keys are in one partition"
    for key in keys:
        mine = [[text for text in each if text.startswith(f"{key} ")] for each in found]
        assert [each for each in mine if each] == [[f"{key} {number}" for number in range(3)]], "a key is parted"


@case("partitions")
async def a_binding_with_one_partition_has_all_messages_in_order(subject: QueueSubject) -> None:
    [queue] = await parted(subject, 1)
    await subject.transport.publish([keyed(str(number), f"key-{number % 5}") for number in range(20)])
    await subject.transport.publish([keyed("20", None)])
    assert texts(await settled(subject, queue)) == [str(number) for number in range(21)]


@case("partitions")
async def what_a_partition_had_out_comes_back_in_order_when_its_consumer_closes(subject: QueueSubject) -> None:
    [queue] = await parted(subject, 1)
    await subject.transport.publish([keyed(str(number), "key") for number in range(12)])
    inbox = await Inbox(subject).open(queue, prefetch=8)
    await subject.rest()
    assert texts(inbox.got) == [str(number) for number in range(8)]
    for each in inbox.got[:3]:
        each.start()
        await each.settle("handled")
    await inbox.close()
    found = await settled(subject, queue)
    assert texts(found) == [str(number) for number in range(3, 12)]
    assert all(each.redelivered for each in found[:5]), "what was out before does not say so"


@case("partitions")
async def what_is_released_to_a_partition_comes_back_in_its_place(subject: QueueSubject) -> None:
    [queue] = await parted(subject, 1)
    await subject.transport.publish([keyed(str(number), "key") for number in range(5)])
    inbox = await Inbox(subject).open(queue, prefetch=5)
    await subject.rest()
    assert inbox.consumer is not None
    inbox.consumer.pause()
    for each in reversed(inbox.got):
        await each.release(begun=False)
    await inbox.close()
    assert texts(await settled(subject, queue)) == [str(number) for number in range(5)]


@case("partitions")
async def a_later_generation_comes_beside_the_earlier_one_until_that_is_abandoned(subject: QueueSubject) -> None:
    transport, keys = subject.transport, [f"key-{number}" for number in range(6)]

    async def contents(queues: list[str]) -> list[str]:
        return sorted([text for queue in queues for text in texts(await settled(subject, queue))])

    before = await parted(subject, 2)
    earlier = await Inbox(subject).open(before[0], prefetch=100), await Inbox(subject).open(before[1], prefetch=100)
    after = await parted(subject, 3, generation=2)
    assert len(after) == 3 and not set(before) & set(after), f"two generations share a queue: {before} and {after}"
    await transport.publish([keyed(f"both {key}", key) for key in keys])
    assert await contents(after) == [f"both {key}" for key in keys]
    await cast(Partitioned, transport).abandon(in_parts(2))
    await transport.publish([keyed(f"one {key}", key) for key in keys])
    assert await contents(after) == [f"one {key}" for key in keys]
    await subject.rest()
    assert sorted(texts([*earlier[0].got, *earlier[1].got])) == [f"both {key}" for key in keys]
    await cast(Partitioned, transport).abandon(in_parts(2))
    for each in earlier:
        await each.close()
