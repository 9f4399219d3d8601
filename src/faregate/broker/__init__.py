"""The embedded broker: queues, pump, topics, schedule. It knows no protocol and no bus.

Everything in here is owned by one event loop; nothing takes a lock and nothing awaits while it changes state.
"""

from faregate.broker.broker import Broker

__all__ = ["Broker"]
