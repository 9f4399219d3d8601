"""A process that asks and waits: python -m tests.rabbitmq.asker BROKER SHOP PRICES"""

import asyncio
import sys

import faregate as fg
from tests.bus.test_request import AskPrice


async def main(broker: str, shop: str, prices: str) -> None:
    async with fg.Bus(broker, nodes=[fg.Node(shop)]) as bus:
        await bus.request(AskPrice(sku="17"), to=prices, timeout=60)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
