"""The contracts between the services. In real life each service declares only the fields that it needs.

The key of an event is what its order goes by where several instances of a service share the work.
"""

import faregate as fg


class OrderPlaced(fg.Event, key="customer"):
    order_id: str
    customer: str
    total: int


class ChargeCard(fg.Command, wire="charge-card"):
    order_id: str
    amount: int


class CardCharged(fg.Event, key="order_id"):
    order_id: str
    amount: int


class OrderShipped(fg.Event):
    order_id: str
