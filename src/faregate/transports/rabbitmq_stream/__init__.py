"""RabbitMQ streams as a log: `rabbitmq-stream://…`. Needs the extra `faregate[rabbitmq]`.

    log.py          the log
    connection.py   the stream protocol, blocking; what the URL says is in address.py
    pool.py         the connections that the logs of a process share
    chunks.py       the entries of what the broker delivers, and of what it is given
    entries.py      an envelope as an entry of a stream, an AMQP 1.0 message (amqp.py)
    following.py    a small stream beside the messages:
    identity.py     whether a stream is the one that it was
    readers.py      how far named readers have come
    bindings.py     who subscribed to what, and when
    staging.py      what many tasks made, as one batch

Nothing in here is asynchronous, but for what the port asks to be.
"""

from faregate.ports.extras import needs_extra

with needs_extra("rabbitmq", "A RabbitMQ stream"):
    from faregate.transports.rabbitmq_stream.log import RabbitmqStreamLog, create_stream

__all__ = ["RabbitmqStreamLog", "create_stream"]
