"""Streams over TLS. The broker of the tests has no certificate: a server before it has one, and passes all on."""

import asyncio
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from faregate.errors import ConfigurationError
from faregate.transports.rabbitmq_stream.address import parse_address
from faregate.transports.rabbitmq_stream.connection import Connection
from tests.presence import address
from tests.rabbitmq.proxy import proxied
from tests.rabbitmq_stream.streams import new_stream

pytestmark = pytest.mark.services


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    files = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=broker"]
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    subprocess.run([*command, *more], check=True, capture_output=True)
    return files


async def test_a_stream_is_read_and_written_over_tls(certificate: tuple[str, str]) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate)
    with new_stream(address("FAREGATE_TEST_RABBITMQ_STREAM")) as url:
        stream = parse_address(url).stream
        async with proxied(url, tls) as (behind, _):
            over_tls = behind.replace("rabbitmq-stream:", "rabbitmq-stream+tls:")

            def talk(more: str, work: Callable[[Connection], object]) -> object:
                connection = Connection(parse_address(over_tls + more))
                try:
                    return work(connection)
                finally:
                    connection.close()

            ca = f"&cafile={certificate[0]}"
            await asyncio.to_thread(talk, ca, lambda each: each.publish(stream, [b"a", b"b"], ""))
            assert await asyncio.to_thread(talk, ca, lambda each: each.end(stream)) == 2
            with pytest.raises(ConfigurationError, match=r"no TLS with 127\.0\.0\.1:.*certificate verify failed"):
                await asyncio.to_thread(talk, "", lambda each: each.end(stream))
    with pytest.raises(ConfigurationError, match="knows the options stream, amqp_port, not cafile"):
        parse_address(f"{url}&cafile=ca.pem")
