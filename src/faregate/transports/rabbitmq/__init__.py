"""RabbitMQ as a queue transport, `amqp://` and `amqps://`: nodes in processes of their own, any number of instances.

address     what a URL says
link        a connection that comes back
channels    aiormq's channel, working on batches
wire        an envelope as an AMQP message, and back
names       exchanges, routing keys, queues
topology    declaring them
publisher   publishing with confirms
consumer    consuming, acknowledging, giving back
presence    heartbeats, for people
delay       queues that messages wait in, for nodes without a store
queue       the transport itself
"""

from faregate.ports.extras import needs_extra

with needs_extra("rabbitmq", "a transport amqp://…"):
    import aiormq as _driver  # noqa: F401 - so that a missing driver is said here, by its extra

from faregate.transports.rabbitmq.queue import RabbitmqQueue

__all__ = ["RabbitmqQueue"]
