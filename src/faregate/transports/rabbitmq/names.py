"""What exchanges, routing keys and queues are called. Names of nodes and types have no dots, so none is ambiguous.

faregate              where every publication goes: event.SOURCE.TYPE.SLOT, command.NODE.TYPE.SLOT
faregate.to           for those that name their recipients: QUEUE.SLOT, for each of them
faregate.presence     who runs which nodes, for people (`presence.py`): NODE; what they ask of them: asked.NODE
NODE.TYPE[.SOURCE]    the queue of a subscription; with .gG-P behind it, partition P of its generation G
NODE-dead             the dead letters of a node
QUEUE.moving          what waits and what comes while `faregate rabbitmq migrate` makes a queue anew
QUEUE@log             says that this subscription reads the log view: no bus may consume its queue
faregate.reply.WHO    the replies of a process that asked (`replies.py`)
faregate.delay.…      queues that messages wait in (`delay.py`)
"""

from faregate.errors import ConfigurationError
from faregate.ids import slot_of
from faregate.message import Envelope
from faregate.ports.queue import Binding

EXCHANGE, TO, PRESENCE = "faregate", "faregate.to", "faregate.presence"
FENCE = "faregate.fence"
"""The type of a message that `faregate rabbitmq repartition` puts behind what waits in a queue."""
_REPLIES = "faregate.reply."
LONGEST_QUEUE = 200
"""Characters; a routing key has 255, and that of a delay says bits, too."""


def routing_key(envelope: Envelope) -> str:
    address = envelope.source if envelope.kind == "event" else envelope.destination
    return f"{envelope.kind}.{address}.{envelope.type}.{slot_of(envelope.key)}"


def queue_at(node: str, envelope: Envelope) -> str:
    """The queue, at that node, of the subscription that takes this message; as `Binding.queue`."""
    return f"{node}.{envelope.type}.{envelope.source}" if envelope.kind == "event" else f"{node}.{envelope.type}"


def topic(binding: Binding) -> str:
    """What its routing keys begin with."""
    return f"{binding.kind}.{binding.source if binding.kind == 'event' else binding.node}.{binding.type}"


def dead_queue(node: str) -> str:
    return f"{node}-dead"


def moving_queue(queue: str) -> str:
    return f"{queue}.moving"


def view_mark(queue: str) -> str:
    return f"{queue}@log"


def reply_queue(who: str) -> str:
    return check_queue(f"{_REPLIES}{who}")


def is_reply_queue(name: str) -> bool:
    return name.startswith(_REPLIES) and len(name) <= LONGEST_QUEUE


def check_queue(name: str) -> str:
    if len(name) > LONGEST_QUEUE:
        raise ConfigurationError(
            f"the queue {name} has a name of {len(name)} characters, and RabbitMQ leaves room for {LONGEST_QUEUE}: "
            "shorten the names of the node, the message and its source"
        )
    return name
