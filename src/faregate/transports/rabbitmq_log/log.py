"""`amqp://…?stream=NAME` as a log: what a bus on RabbitMQ publishes is read from the stream beside its queues, and what
is appended here goes through the exchange, as if a bus had published it: into the queues, and so into the stream.

Rules kept here:
- Reading is `rabbitmq_stream`'s, over the network, from wherever tasks run.
- Appending returns when the broker has confirmed it for all queues and the stream. A batch with a name is noted as done
  when it was published (STREAM.commits). A crash in between publishes it again, under the same ids, which those with a
  store recognise.
- A subscription that reads the log has no queue; see `handover.py`.
"""

from collections.abc import Sequence
from urllib.parse import parse_qsl, unquote, urlsplit

from faregate.errors import ConfigurationError
from faregate.message import Envelope
from faregate.ports.queue import Binding
from faregate.ports.topology import Reading
from faregate.transports.rabbitmq.address import parse_address
from faregate.transports.rabbitmq_log.exchange import Exchange
from faregate.transports.rabbitmq_log.handover import RabbitmqHandover
from faregate.transports.rabbitmq_stream import RabbitmqStreamLog
from faregate.transports.rabbitmq_stream.address import Address, tls_of


class RabbitmqLog(RabbitmqStreamLog):
    """Raises `BrokerUnavailable`, `ConfigurationError` and `StreamNotFound`, when it is made and later."""

    def __init__(self, url: str) -> None:
        self._exchange = Exchange(url)
        address = stream_address(url)
        super().__init__(address, self._exchange)

    def append(self, envelopes: Sequence[Envelope], name: str | None = None) -> None:
        if name is None:
            self._exchange.send(envelopes)
        else:
            self._stage.once(name, len(envelopes), lambda: self._exchange.send(envelopes))

    def handover(self) -> RabbitmqHandover:
        return RabbitmqHandover(self, self._exchange, self._stream)

    def tidy(self, binding: Binding) -> None:
        self.handover().tidy(binding)

    def hand_over(self, binding: Binding, reading: Reading) -> bool:
        """Note that a subscription is consumed through another view now. False: somebody else was first."""
        with self._lock:
            return self._pool.ask(lambda connection: self._bindings.hand_over(connection, binding, reading))


def stream_address(url: str) -> Address:
    """Where the stream of a RabbitMQ is read. Raises `ConfigurationError` where none is named."""
    known = parse_address(url)
    if known.stream is None:
        raise ConfigurationError(
            f"{known.url} has no log: let everything go into a stream, too, with ?stream=NAME, in all processes"
        )
    first, *others = (urlsplit(broker) for broker in known.brokers)
    options = dict(parse_qsl(first.query))
    return Address(
        url=known.url,
        host=first.hostname or "",
        port=known.stream_port,
        amqp_port=first.port or 0,
        user=unquote(first.username or "guest"),
        password=unquote(first.password or "guest"),
        vhost=unquote(first.path[1:]) or "/",
        stream=known.stream,
        tls=tls_of(options) if first.scheme == "amqps" else None,
        others=tuple((each.hostname or "", known.stream_port) for each in others),
    )
