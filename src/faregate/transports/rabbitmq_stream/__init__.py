"""RabbitMQ streams as a log: `rabbitmq-stream://…`. Needs the extra `faregate[rabbitmq]`.

address.py      what the URL says
connection.py   the stream protocol, blocking
chunks.py       the entries of what the broker delivers, and of what it is given
amqp.py         AMQP 1.0, as far as a message needs it
entries.py      an envelope as an entry of a stream
readers.py      how far named readers have come
log.py          the log
"""

from faregate.ports.extras import needs_extra

with needs_extra("rabbitmq", "A RabbitMQ stream"):
    from faregate.transports.rabbitmq_stream.log import RabbitmqStreamLog, create_stream

__all__ = ["RabbitmqStreamLog", "create_stream"]
