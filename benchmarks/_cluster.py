"""A cluster of RabbitMQ nodes for one benchmark: the tests' own (tests/rabbitmq/server.py)."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def cluster(nodes: int) -> Iterator[str]:
    """FAREGATE_TEST_RABBITMQ names its first node within the block; with 0 nodes it stays as it is. Gives what to say
    about it."""
    if not nodes:
        yield "the RabbitMQ at FAREGATE_TEST_RABBITMQ"
        return
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tests.rabbitmq.server import private_cluster

    with private_cluster(nodes) as made:
        os.environ["FAREGATE_TEST_RABBITMQ"] = made.nodes[0].url
        yield f"A cluster of {nodes} RabbitMQ nodes on loopback"
