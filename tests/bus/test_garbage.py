"""What a handler keeps does not keep its bus: deliveries are not seen by the garbage collector."""

import asyncio
import gc
import weakref
from pathlib import Path

import pytest

import faregate as fg


class Ordered(fg.Event):
    order_id: str


class Kept(list[fg.Context]):
    """A list that can be referred to weakly."""


async def handle_and_keep(url: str, store: str | None) -> tuple[weakref.ref[Kept], weakref.ref[fg.Bus]]:
    kept = Kept()
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(Ordered, source="shop", key="order_id")
    async def bill(order: Ordered, ctx: fg.Context) -> None:
        kept.append(ctx)

    async with fg.Bus(url, nodes=[shop, billing], store=store) as bus:
        await bus.publish(Ordered(order_id="17"), node="shop")
        await bus.publish(Ordered(order_id="18"), node="shop")
        await bus.idle()
    assert [ctx.key for ctx in kept] == ["17", "18"]
    return weakref.ref(kept), weakref.ref(bus)


@pytest.mark.parametrize("store", [None, "memory:"])
@pytest.mark.parametrize("transport", ["memory:", "journal:"])
def test_a_closed_bus_is_collected_though_its_handler_kept_contexts(
    transport: str, store: str | None, tmp_path: Path
) -> None:
    url = transport if transport == "memory:" else f"{transport}{tmp_path}/journal"
    kept, bus = asyncio.run(handle_and_keep(url, store))  # timers of a loop that goes on would keep some of it
    gc.collect()
    gc.collect()
    assert kept() is None
    assert bus() is None
