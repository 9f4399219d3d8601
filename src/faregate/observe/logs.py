"""Log records say which message they are about: those of a handler's own logger, too.

    handler = logging.StreamHandler()
    handler.addFilter(fg.observe.LogContext())
    handler.setFormatter(logging.Formatter("%(asctime)s %(node)s %(message_id)s %(key)s %(lane)s %(message)s"))

Rules kept here:
- It is a filter for log handlers, and lets everything pass. It adds `node`, `message_id`, `correlation_id`, `key` and
  `lane` to a record, "-" where there is none; what a record has already stays.
- Keys and ids come from outside, so they are made plain: none of them can break a line.
"""

import logging

from faregate.core import at_hand
from faregate.core.lane_task import lane_name
from faregate.plain import plain

_NOTHING = "-"
FIELDS = ("node", "message_id", "correlation_id", "key", "lane")


class LogContext(logging.Filter):
    """Making one switches it on for this process: from then on each run of a handler notes its message."""

    def __init__(self, name: str = "") -> None:
        super().__init__(name)
        at_hand.wanted = True

    def filter(self, record: logging.LogRecord) -> bool:
        if not super().filter(record):
            return False
        work = at_hand.message_at_hand()
        if work is None:
            found: tuple[str | None, ...] = (None,) * len(FIELDS)
        else:
            envelope = work.envelope
            correlation_id = envelope.correlation_id or envelope.publication_id
            found = work.node, work.message_id, correlation_id, work.delivery.key, lane_name()
        known = record.__dict__
        for field, value in zip(FIELDS, found, strict=True):
            known.setdefault(field, _NOTHING if value is None else plain(value))
        return True
