"""`faregate publish` on RabbitMQ: the message goes to the broker, and no node runs in the command."""

import json
import sys
from types import ModuleType
from typing import Any

import pytest

import faregate as fg
from tests.cli.test_status import faregate
from tests.rabbitmq.site import Site


def buses(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """`published:bus` is the bus of the site, with its author."""

    def bus() -> fg.Bus:
        nodes = [fg.Node(site.author), *site.bus().nodes.values()]
        return fg.Bus(site.broker, nodes=nodes, store=site.store)

    module = ModuleType("published")
    module.bus = bus  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "published", module)


def body(number: int) -> str:
    return json.dumps({"account": "a", "number": number})


@pytest.mark.parametrize("more", [(), ("--delay", "0.5")], ids=["now", "later"])
async def test_a_message_waits_at_the_broker_for_whoever_runs_the_nodes(
    any_site: Site, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    site = any_site
    buses(site, monkeypatch)
    for number in range(2):
        code, told = await faregate("publish", "published:bus", "Step", body(number), *more)
        assert (code, told.partition(": ")[2]) == (0, "it is durable\n")
    assert site.seen() == {}, "the command ran no handler"
    module: Any = sys.modules["published"]
    async with module.bus():
        await site.until_seen(2)
    assert {account: sorted(numbers) for account, numbers in site.seen().items()} == {"a": [0, 1]}
