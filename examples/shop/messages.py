"""The contracts between the services. In real life each service declares only the fields that it needs."""

import faregate as fg


class OrderPlaced(fg.Event):
    order_id: str
    customer: str
    total: int


class ChargeCard(fg.Command, wire="charge-card"):
    order_id: str
    amount: int


class CardCharged(fg.Event):
    order_id: str
    amount: int


class OrderShipped(fg.Event):
    order_id: str
