"""A newer RabbitMQ than the distribution's keeps the same promises: Debian trixie's, as `./dev services fetch` has it.

`FAREGATE_RABBITMQ=4.0 ./dev test PATHS` runs any other test on it; docs/rabbitmq.md says on what they were run.
"""

import subprocess
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
from pamqp.commands import Basic

from faregate.testing import run_queue_case
from faregate.testing.log_suite import run_log_case
from tests.presence import missing
from tests.rabbitmq.rig import rabbitmq_subject
from tests.rabbitmq.server import PrivateRabbitmq, private_rabbitmq
from tests.rabbitmq.test_conformance import CASES, LASTING
from tests.rabbitmq_stream import test_entries, test_log
from tests.rabbitmq_stream.streams import new_stream, stream_subject

VERSION = "4.0"
DEV = Path(__file__).parents[2] / "dev"

pytestmark = pytest.mark.full


def fetched(version: str) -> Path:
    """Skips, or fails in CI, where it cannot be had."""
    done = subprocess.run([DEV, "services", "fetch", version], check=False, capture_output=True, text=True)
    if done.returncode:
        missing(f"RabbitMQ {version} cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    return Path(done.stdout.strip())


@pytest.fixture
def server() -> Iterator[PrivateRabbitmq]:
    with private_rabbitmq(fetched(VERSION), streams=True) as started:
        yield started


async def failing(names: Iterable[str], run: Callable[[str], Awaitable[None]]) -> dict[str, str]:
    """All of them on one server, since each slice of the long tier would start one of its own."""
    found: dict[str, str] = {}
    for name in names:
        try:
            await run(name)
        except Exception as exc:
            found[name] = repr(exc)
    return found


async def test_its_queues_keep_the_promises_of_the_queue_port(server: PrivateRabbitmq) -> None:
    assert server.control("version").startswith(f"{VERSION}.")

    async def run(name: str) -> None:
        await run_queue_case(name, partial(rabbitmq_subject, server.url, real_time=name in LASTING))

    assert not await failing(CASES, run)


async def test_its_streams_keep_the_promises_of_the_log_port(
    server: PrivateRabbitmq, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(name: str) -> None:
        await run_log_case(name, partial(stream_subject, server.stream_url, **test_log.ARGUMENTS.get(name, {})))

    assert not await failing([name for name in test_log.LOG_CASES if name != test_log.BROKERS], run)
    monkeypatch.setenv("FAREGATE_TEST_RABBITMQ", server.url)
    with new_stream(server.stream_url) as stream:
        properties = Basic.Properties(message_id="p", message_type="Charge", app_id="shop")
        found = await test_entries.routed(stream, "command.billing.Charge.-", b"{}", properties)
    assert (found.publication_id, found.type, found.source, found.destination) == ("p", "Charge", "shop", "billing")
