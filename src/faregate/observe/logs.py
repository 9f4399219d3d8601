"""Log records say which message they are about: those of a handler's own logger, too.

    handler = logging.StreamHandler()
    handler.addFilter(fg.observe.LogContext())
    handler.setFormatter(logging.Formatter("%(asctime)s %(node)s %(message_id)s %(key)s %(lane)s %(message)s"))

Rules kept here:
- It is a filter for log handlers, and lets everything pass. It adds `node`, `message_id`, `correlation_id`, `key` and
  `lane` to a record, "-" where there is none; what a record has already stays.
- They are those of the message at hand. Records that Faregate makes later, or of another message, bring their own.
"""

import logging

from faregate.core import at_hand
from faregate.core.about import about


class LogContext(logging.Filter):
    """Making one switches it on for this process: from then on each run of a handler notes its message."""

    def __init__(self, name: str = "") -> None:
        super().__init__(name)
        at_hand.wanted = True

    def filter(self, record: logging.LogRecord) -> bool:
        if not super().filter(record):
            return False
        work = at_hand.message_at_hand()
        found = about() if work is None else about(work.node, work.message_id, work.envelope, work.delivery.key)
        record.__dict__.update(found | record.__dict__)
        return True
