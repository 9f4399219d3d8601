"""Publishes orders with bare pika: `python -m examples.without_faregate.shop --orders 20`.

What it keeps to is in docs/rabbitmq.md, under "Programs without Faregate":
- One id for one order, and the same id when it is published again: that is what recipients recognise a copy by.
- Persistent, mandatory and confirmed: pika raises when no queue takes a message, or when the broker refuses it.
"""

import argparse
import json
import time

import pika

EXCHANGE, ROUTING_KEY = "faregate", "event.shop.OrderPlaced.-"


def publish(broker: str, orders: int, *, times: int = 1) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(broker))
    channel = connection.channel()
    channel.confirm_delivery()
    for _ in range(times):
        for number in range(orders):
            properties = pika.BasicProperties(
                message_id=f"order-{number}",
                type="OrderPlaced",
                app_id="shop",
                content_type="application/json",
                delivery_mode=pika.DeliveryMode.Persistent.value,
                timestamp=int(time.time()),
            )
            body = json.dumps({"order_id": f"{number}", "total": 10 + number}).encode()
            channel.basic_publish(EXCHANGE, ROUTING_KEY, body, properties, mandatory=True)
    connection.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Publish orders.")
    parser.add_argument("--broker", default="amqp://guest:guest@localhost:5672/")
    parser.add_argument("--orders", type=int, default=20)
    parser.add_argument("--times", type=int, default=1, help="how often each is published, under one message_id")
    given = parser.parse_args()
    publish(given.broker, given.orders, times=given.times)
    print(f"published {given.orders} orders, {given.times} times each")
