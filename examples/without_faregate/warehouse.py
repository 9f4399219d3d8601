"""Ships what was billed, with bare pika and sqlite3: `python -m examples.without_faregate.warehouse`.

The broker delivers at least once, so a program without Faregate has to recognise copies by itself: the parcel and the
message's id are one commit, and the message is acknowledged after it. A node does the same, in its ledger.
"""

import argparse
import json
import signal
import sqlite3
from contextlib import closing

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.spec import Basic, BasicProperties

EXCHANGE, QUEUE, ROUTING_KEY = "faregate", "warehouse", "event.billing.OrderBilled.*"
SCHEMA = """
create table if not exists seen(message_id text primary key);
create table if not exists parcels(order_id text);
"""


def ship(database: sqlite3.Connection, message_id: str, order_id: str) -> bool:
    """False: this message was seen before."""
    with database:
        if database.execute("insert or ignore into seen values (?)", (message_id,)).rowcount == 0:
            return False
        database.execute("insert into parcels values (?)", (order_id,))
        return True


def consume(broker: str, database: sqlite3.Connection) -> None:
    channel = pika.BlockingConnection(pika.URLParameters(broker)).channel()
    channel.exchange_declare(EXCHANGE, "topic", durable=True)  # as Faregate does: whoever is first makes it
    channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
    channel.queue_bind(QUEUE, EXCHANGE, ROUTING_KEY)
    channel.basic_qos(prefetch_count=100)

    def take(_: BlockingChannel, method: Basic.Deliver, properties: BasicProperties, body: bytes) -> None:
        order_id = json.loads(body)["order_id"]
        if ship(database, properties.message_id, order_id):
            print(f"shipped order {order_id}", flush=True)
        channel.basic_ack(method.delivery_tag)

    channel.basic_consume(QUEUE, take)
    print("the warehouse is ready; Ctrl-C ends it", flush=True)
    channel.start_consuming()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ship what was billed.")
    parser.add_argument("--broker", default="amqp://guest:guest@localhost:5672/")
    parser.add_argument("--database", default="warehouse.db")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with closing(sqlite3.connect(given.database)) as database:
        database.executescript(SCHEMA)
        try:
            consume(given.broker, database)
        except KeyboardInterrupt:
            print("the warehouse is closed")
