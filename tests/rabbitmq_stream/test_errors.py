"""What can be wrong with the address of a stream, each said in a sentence."""

import socket
from urllib.parse import urlsplit

import pytest

from faregate.errors import BrokerUnavailable, ConfigurationError, MessageTooLarge, OffsetGone, StreamNotFound
from faregate.message import Envelope
from faregate.ports.schemes import open_log
from faregate.transports.rabbitmq_stream import create_stream
from tests.presence import address
from tests.rabbitmq_stream.streams import new_stream

pytestmark = pytest.mark.services


@pytest.fixture
def server() -> str:
    return address("FAREGATE_TEST_RABBITMQ_STREAM")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def test_a_stream_that_is_not_there(server: str) -> None:
    with pytest.raises(StreamNotFound, match="there is no stream nowhere at rabbitmq-stream://faregate:\\*\\*\\*@"):
        open_log(f"{server}?stream=nowhere")


def test_wrong_credentials(server: str) -> None:
    wrong = server.replace("://faregate:", "://faregate:x")
    with pytest.raises(ConfigurationError, match="refuses the user or the password") as caught:
        open_log(f"{wrong}?stream=orders")
    assert urlsplit(wrong).password not in str(caught.value)


def test_a_virtual_host_that_is_not_there(server: str) -> None:
    with pytest.raises(ConfigurationError, match="into the virtual host 'nowhere'"):
        open_log(f"{server}nowhere?stream=orders")


def test_nobody_answers() -> None:
    port, other = free_port(), free_port()
    with pytest.raises(BrokerUnavailable, match=f"no RabbitMQ answers at .*:{port}.*Start it, or mend the URL"):
        open_log(f"rabbitmq-stream://127.0.0.1:{port}/?stream=orders&amqp_port={other}")


def test_a_broker_without_the_plugin() -> None:
    amqp = urlsplit(address("FAREGATE_TEST_RABBITMQ")).port
    with pytest.raises(ConfigurationError, match="run rabbitmq-plugins enable rabbitmq_stream there"):
        open_log(f"rabbitmq-stream://127.0.0.1:{free_port()}/?stream=orders&amqp_port={amqp}")


def test_the_port_of_the_queues() -> None:
    amqp = urlsplit(address("FAREGATE_TEST_RABBITMQ")).port
    with pytest.raises(ConfigurationError, match=f"127.0.0.1:{amqp} speaks AMQP: give the port of the streams"):
        open_log(f"rabbitmq-stream://127.0.0.1:{amqp}/?stream=orders")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("rabbitmq-stream://127.0.0.1/", "is no address of a stream: rabbitmq-stream://USER"),
        ("rabbitmq-stream://127.0.0.1/?stream=a&name=b", "knows the options stream, amqp_port, not name"),
        ("rabbitmq-stream://127.0.0.1/a/b?stream=a", "write that as %2F"),
        ("rabbitmq-stream://127.0.0.1/?stream=ü", "use up to 200 characters of ASCII"),
        ("rabbitmq-stream://127.0.0.1/?stream=a&amqp_port=x", "has a port that is none"),
    ],
)
def test_an_address_that_is_none(url: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        open_log(url)


def test_a_message_that_is_too_large(server: str) -> None:
    with new_stream(server) as url:
        log = open_log(url)
        with pytest.raises(MessageTooLarge, match=r"stream\.frame_max"):
            log.append([Envelope(body=b"x"), Envelope(body=bytes(1 << 20))])
        assert log.latest() == 0, "a part of what was refused is in the stream"


def test_loading_what_is_not_there(server: str) -> None:
    with new_stream(server) as url:
        log = open_log(url)
        log.append([Envelope(body=b"x")])
        with pytest.raises(OffsetGone):
            log.load([0, 5])


def test_a_stream_is_created_once(server: str) -> None:
    with new_stream(server) as url:
        create_stream(url)
        log = open_log(url)
        log.append([Envelope(body=b"x")])
        create_stream(url)
        assert log.latest() == 1


def test_a_connection_that_died_while_it_was_idle_is_replaced(server: str) -> None:
    with new_stream(server) as url:
        log = open_log(url)
        log.append([Envelope(body=b"a")])
        for _, connection in log._pool._idle:
            connection._socket.shutdown(socket.SHUT_RDWR)
        assert log.latest() == 1
        for _, connection in log._pool._idle:
            connection._socket.shutdown(socket.SHUT_RDWR)
        log.append([Envelope(body=b"b")])
        assert [envelope.body for _, envelope in log.envelopes()] == [b"a", b"b"]
