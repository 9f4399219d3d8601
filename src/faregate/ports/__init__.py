"""Ports: the small protocols through which the bus meets clocks, transports and, later, stores.

Each method carries its promise: what is atomic, which errors, what closing means. Adapters implement them; the
suites in `faregate.testing` check the promises.
"""

from faregate.ports.clock import Clock, SystemClock, Timer
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Binding, Consumer, Delivery, Outcome, QueueTransport, dead_letter_queue

__all__ = [
    "Binding",
    "Clock",
    "Consumer",
    "DeadLetter",
    "Delivery",
    "Outcome",
    "QueueTransport",
    "SystemClock",
    "Timer",
    "dead_letter_queue",
]
