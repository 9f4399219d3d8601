"""Reads deliveries of one subscription into the context that its handler sees, or says what is wrong with them."""

from typing import NoReturn

from faregate.codec import BodyReader
from faregate.core.alarms import Alarms
from faregate.core.context import Context
from faregate.core.work import Work
from faregate.errors import MissingProperties, UnknownType
from faregate.message import Envelope
from faregate.node.subscription import Subscription
from faregate.plain import plain


class Reader:
    def __init__(self, subscription: Subscription, alarms: Alarms, body_limit: int) -> None:
        self._subscription = subscription
        self._node = subscription.node
        self._type = subscription.message_type.wire
        self._kind = subscription.message_type.kind
        self._alarms = alarms
        self._leaves_behind = False
        """Whether that alarm has sounded."""
        self._read = BodyReader(subscription.message_type.cls, limit=body_limit).read
        told = [subscription.key if subscription.by_key else None, subscription.business_key]
        self._told = [key for key in told if key is not None and key.may_fail]
        """Keys that may not be readable where the message is: a function may fail."""

    def open(self, work: Work) -> Context:
        """The context of a delivery. Raises `Permanent` for one that cannot be read."""
        envelope = work.envelope
        if envelope.type != self._type or envelope.kind != self._kind or not envelope.publication_id:
            self._refuse(envelope)
        message = self._read(envelope)
        for key in self._told:
            key.check(message)
        return Context(work, message)

    def left_behind(self, ctx: Context) -> None:
        """It was used after its end."""
        if not self._leaves_behind:
            self._leaves_behind = True
            self._alarms.sound(
                "left-behind",
                self._node,
                ctx.message_id,
                f"the handler {self._subscription.name!r} leaves tasks or threads behind: one used ctx after the try "
                f"of {ctx} had ended, and was refused. Await everything before the handler returns or raises",
                envelope=ctx._work.envelope,
                key=ctx.key,
            )

    def _refuse(self, envelope: Envelope) -> NoReturn:
        """Say what is missing or wrong."""
        if not envelope.publication_id:
            raise MissingProperties("the message has no publication id, so it cannot be told from a repetition")
        if not envelope.type:
            raise MissingProperties("the message does not say what type it is")
        raise UnknownType(
            f"{self._subscription} handles the {self._kind} {self._type}, not the {envelope.kind} "
            f"{plain(envelope.type)}"
        )
