"""`amqp://…?stream=NAME` as a log: the log view of a RabbitMQ. Needs the extra `faregate[rabbitmq]`.

log.py          the log: its stream is read, its exchange is written to
exchange.py     RabbitMQ's exchange and queues for who has no event loop
handover.py     a subscription from its queue to the log, and back
"""

from faregate.ports.extras import needs_extra

with needs_extra("rabbitmq", "RabbitMQ"):
    from faregate.transports.rabbitmq_log.log import RabbitmqLog

__all__ = ["RabbitmqLog"]
