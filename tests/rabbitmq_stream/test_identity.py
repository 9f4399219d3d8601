"""A stream that was deleted and declared anew is another log, whatever its name."""

from collections.abc import Iterator
from threading import Thread

import pytest

from faregate.message import Envelope
from faregate.ports.schemes import open_log
from faregate.transports.rabbitmq_stream.address import parse_address
from faregate.transports.rabbitmq_stream.identity import identify
from tests.presence import address
from tests.rabbitmq_stream.streams import connected, new_stream

pytestmark = pytest.mark.services


@pytest.fixture
def stream() -> Iterator[str]:
    with new_stream(address("FAREGATE_TEST_RABBITMQ_STREAM")) as url:
        yield url


def id_now(url: str) -> str:
    with connected(url) as connection:
        return identify(connection, parse_address(url).stream)


def declare_anew(url: str) -> None:
    name = parse_address(url).stream
    with connected(url) as connection:
        connection.delete(name)
        connection.create(name, {})


def fill(url: str, count: int) -> None:
    with connected(url) as connection:
        for number in range(count):
            connection.publish(parse_address(url).stream, [b"%d" % number], "")


def test_it_stays_the_same_while_messages_come(stream: str) -> None:
    first = id_now(stream)
    for _ in range(3):
        fill(stream, 5)
        assert id_now(stream) == first
    assert open_log(stream).log_id == first


def test_it_stays_the_same_when_the_witness_was_removed() -> None:
    limits = {"max_length_bytes": "100000", "stream_max_segment_size_bytes": "30000"}
    with new_stream(address("FAREGATE_TEST_RABBITMQ_STREAM"), **limits) as url:
        fill(url, 1)
        first, log = id_now(url), open_log(url)
        while log.earliest() == 0:
            log.append([Envelope(body=bytes(10_000))])
        assert id_now(url) == first
        assert id_now(url) == first, "the new witness tells otherwise"


@pytest.mark.parametrize("count", [0, 3, 5, 50])
def test_a_stream_that_was_declared_anew_has_another(stream: str, count: int) -> None:
    fill(stream, 5)
    first = id_now(stream)
    declare_anew(stream)
    fill(stream, count)
    second = id_now(stream)
    assert second != first, "offsets of the old stream would mean other messages"
    assert id_now(stream) == second


def test_all_who_come_first_agree(stream: str) -> None:
    found: list[str] = []
    readers = [Thread(target=lambda: found.append(id_now(stream))) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert len(found) == 8
    assert {*found} == {id_now(stream)}
