"""The services that the tests stand on answer, and run as they should."""

import os
from pathlib import Path
from urllib.parse import urlsplit

import aiormq
import psycopg
import pytest
from pyspark.sql import SparkSession

from faregate.message import Envelope
from faregate.ports.schemes import open_log
from tests.rabbitmq_stream.streams import new_stream

pytestmark = pytest.mark.services


def owner_of(process: int) -> int:
    return Path(f"/proc/{process}").stat().st_uid


async def test_postgres_answers(postgres_server: str) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_server) as connection:
        row = await (await connection.execute("select 1")).fetchone()
    assert row == (1,)


async def test_postgres_is_as_durable_as_in_production(postgres_server: str) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_server) as connection:
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            row = await (await connection.execute(f"show {setting}")).fetchone()
            assert row == ("on",), setting


async def test_postgres_does_not_run_as_root(postgres_server: str) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_server) as connection:
        row = await (await connection.execute("select pg_backend_pid()")).fetchone()
        assert row is not None
        assert owner_of(row[0]) != 0


async def test_postgres_refuses_a_wrong_password(postgres_server: str) -> None:
    password = urlsplit(postgres_server).password
    assert password, "the private server is reached with a generated password"
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        await psycopg.AsyncConnection.connect(postgres_server.replace(password, "wrong"))


async def test_rabbitmq_takes_a_confirmed_message_into_a_quorum_queue_and_gives_it_back(
    rabbitmq_url: str,
) -> None:
    name = f"faregate-services-{os.getpid()}"
    connection = await aiormq.connect(rabbitmq_url)
    try:
        channel = await connection.channel(publisher_confirms=True)
        await channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
        try:
            confirmation = await channel.basic_publish(
                b"one", routing_key=name, properties=aiormq.spec.Basic.Properties(delivery_mode=2)
            )
            assert isinstance(confirmation, aiormq.spec.Basic.Ack)
            message = await channel.basic_get(name, no_ack=True)
            assert message.body == b"one"
        finally:
            await channel.queue_delete(name)
    finally:
        await connection.close()


async def test_rabbitmq_offers_the_consistent_hash_exchange(rabbitmq_url: str) -> None:
    name = f"faregate-services-{os.getpid()}"
    connection = await aiormq.connect(rabbitmq_url)
    try:
        channel = await connection.channel()
        await channel.exchange_declare(name, exchange_type="x-consistent-hash")
        await channel.exchange_delete(name)
    finally:
        await connection.close()


def test_rabbitmq_keeps_a_stream_that_can_be_read_from_its_start(rabbitmq_stream_url: str) -> None:
    with new_stream(rabbitmq_stream_url) as url:
        open_log(url).append([Envelope("one", body=b"one")])
        assert [each.body for _, each in open_log(url).envelopes()] == [b"one"]


def test_spark_starts_and_counts_rows(spark: SparkSession) -> None:
    assert spark.range(1000).filter("id % 2 = 0").count() == 500
