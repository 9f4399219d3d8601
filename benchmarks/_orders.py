"""The messages of the benchmarks with handlers, where Spark's workers can import them: about 200 bytes each."""

import faregate as fg

CUSTOMERS = 5000


class Order(fg.Event):
    order_id: str
    customer: str
    total: int
    note: str


class Billed(fg.Event):
    order_id: str
    customer: str
    total: int
    note: str


def make_order(number: int) -> Order:
    customer = f"customer-{number % CUSTOMERS:06}"
    return Order(order_id=f"order-{number:07}", customer=customer, total=number, note="n" * 110)


def bill_order(order: Order) -> Billed:
    return Billed(order_id=order.order_id, customer=order.customer, total=order.total + 1, note=order.note)
