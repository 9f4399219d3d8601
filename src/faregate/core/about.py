"""What a log record says of the message that it is about: given as `extra=`, or the one at hand (`observe/logs.py`).

Rules kept here:
- All fields are there, "-" where there is none. So a record that is about no message does not take the one at hand.
- Keys and ids come from outside, so they are made plain: none of them can break a line.
"""

from faregate.core.lane_task import lane_name
from faregate.ids import message_id_of
from faregate.message import Envelope
from faregate.plain import plain
from faregate.ports.queue import Delivery

FIELDS = ("node", "message_id", "correlation_id", "key", "lane")
NOTHING = "-"


def about(
    node: str = "", message_id: str = "", envelope: Envelope | None = None, key: str | None = None
) -> dict[str, str]:
    """`envelope`, `key`: of that message, where they are known."""
    correlation_id = None if envelope is None else envelope.correlation_id or envelope.publication_id
    lane = lane_name() if message_id else None
    found = zip(FIELDS, (node or None, message_id or None, correlation_id, key, lane), strict=True)
    return {field: NOTHING if value is None else plain(value) for field, value in found}


def about_delivery(node: str, delivery: Delivery) -> dict[str, str]:
    return about(node, message_id_of(delivery.envelope, node), delivery.envelope, delivery.key)
