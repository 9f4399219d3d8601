"""What is measured: a message of 200 bytes, and handlers that do nothing, insert a row, or insert a row and send.

They are in a module of their own because Spark's workers import nodes by name.
"""

from collections.abc import Callable
from typing import Any, Literal

import faregate as fg

Work = Literal["nothing", "insert", "send"]

SCHEMA = "create table if not exists faregate_measured(order_id text, message_id text not null, total integer)"
INSERT = "insert into faregate_measured(order_id, message_id, total) values (?, ?, ?)"
CUSTOMERS = 5_000


class Measured(fg.Event):
    order_id: str
    customer: str
    total: int
    note: str


class Answered(fg.Event):
    order_id: str
    customer: str
    total: int
    note: str


def make_message(number: int, customers: int = CUSTOMERS) -> Measured:
    customer = f"customer-{number % customers:06}"
    return Measured(order_id=f"order-{number:08}", customer=customer, total=number % 10_000, note="n" * 108)


async def nothing(order: Measured) -> None: ...


async def insert(order: Measured, ctx: fg.Context) -> None:
    ctx.db.write(INSERT, (order.order_id, ctx.message_id, order.total))


async def send(order: Measured, ctx: fg.Context) -> Answered:
    ctx.db.write(INSERT, (order.order_id, ctx.message_id, order.total))
    return Answered(order_id=order.order_id, customer=order.customer, total=order.total, note=order.note)


async def pass_on(order: Measured) -> Answered:
    return Answered(order_id=order.order_id, customer=order.customer, total=order.total, note=order.note)


HANDLERS: dict[Work, Callable[..., Any]] = {"nothing": nothing, "insert": insert, "send": send}


def handling(name: str, source: str, handler: Callable[..., Any], *, schema: bool, **options: Any) -> fg.Node:
    node = fg.Node(name, schema=SCHEMA if schema else None)
    node.on(Measured, source=source, name="handle", **options)(handler)
    return node


# For Spark.
publisher = fg.Node("measured")
spark_pass_on = handling("spark-pass-on", "measured", pass_on, schema=False)
spark_insert = handling("spark-insert", "measured", insert, schema=True, key="customer")
spark_send = handling("spark-send", "measured", send, schema=True, key="customer")
