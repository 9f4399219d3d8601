"""The shop with each service in two processes of its own, on a RabbitMQ and a PostgreSQL that live as long as the demo.

Rules kept here:
- Each service has a schema of its own; what the verdict reads are views over all of them.
- Orders go into the outbox of the service `shop`, a batch in a transaction; its processes send them. So orders are
  taken whoever is away.
- The broker is killed, too: each third time it is its turn.
- Nothing here asks the bus what happened: rows are counted in tables.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from urllib.parse import quote

import psycopg

import faregate as fg
from faregate.core.sealing import outbox_row
from faregate.message import Envelope
from faregate.ports.schemes import open_insertion
from faregate.ports.store import FROM_OUTSIDE

from ..shop import app
from .servers import PrivatePostgres, PrivateRabbitmq, private_postgres, private_rabbitmq
from .site import Database, Part, Worker
from .worker import FORGET

INSTANCES = 2
"""Of each service."""
_STREAM = "log"
_BROKERS_TURN = 3
_TABLES = ("invoices", "charges", "parcels")
_VIEWS = {
    "faregate_outbox": "node, dispatched_at",
    "faregate_dead": "node, message_id, reason",
    "faregate_ledger": "node, message_id, digest, sent, sent_ids, outcome",
}
_COUNTS = """
select (select count(*) from invoices), (select count(*) from charges), (select count(*) from parcels),
       (select count(*) from faregate_outbox where dispatched_at is null), (select count(*) from faregate_dead)
"""


class Broker:
    """The RabbitMQ as something that is killed."""

    name = "RabbitMQ"

    def __init__(self, server: PrivateRabbitmq) -> None:
        self._server = server
        self.is_up = True

    def look(self) -> None:
        if not self.is_up:
            self.is_up = self._server.is_ready()

    def start(self) -> None:
        self._server.begin()

    def kill(self) -> None:
        self._server.kill()
        self.is_up = False


class RabbitmqSite:
    turn = 0.25
    threat = "{} kills: of their eight processes, and each third of RabbitMQ itself"
    options = " --rabbitmq"
    keeps_copies = True

    def __init__(self, folder: Path, postgres: PrivatePostgres, rabbitmq: PrivateRabbitmq, *, forgets: bool) -> None:
        self._all = _inside(postgres.url, "public", *app.services)
        self._broker_url = f"{rabbitmq.url}?stream={_STREAM}"
        self.stores = {name: _inside(postgres.url, name) for name in app.services}
        self.log = rabbitmq.stream_url(_STREAM)
        self.workers = [
            Worker(
                folder,
                f"{name}-{number}",
                name,
                environment={
                    "SHOP_BROKER": self._broker_url,
                    "SHOP_STORE": self.stores[name],
                    **({FORGET: "yes"} if forgets else {}),
                },
            )
            for name in app.services
            for number in range(1, INSTANCES + 1)
        ]
        self._broker = Broker(rabbitmq)
        self.parts: list[Part] = [*self.workers, self._broker]
        self._connection = psycopg.connect(self._all, autocommit=True)

    def set_up(self) -> None:
        """Queues and tables, before anybody publishes. The verdict wants to know in which order rows were written."""
        for name in app.services:
            self._connection.execute(f"create schema {name}")
        asyncio.run(self._prepare())
        for table in _TABLES:
            self._connection.execute(f"alter table {table} add column rowid bigserial")
        for view, columns in _VIEWS.items():
            parts = " union all ".join(f"select {columns} from {name}.{view}" for name in app.services)
            self._connection.execute(f"create view public.{view} as {parts}")

    async def _prepare(self) -> None:
        for name, node in app.services.items():
            await fg.Bus(self._broker_url, nodes=[node], store=self.stores[name]).prepare()

    def close(self) -> None:
        self._connection.close()

    def victims(self, crashes: int, chance: Random) -> list[Part]:
        return [
            chance.choice(self.workers) if number % _BROKERS_TURN else self._broker for number in range(1, crashes + 1)
        ]

    def publish(self, envelopes: Sequence[Envelope], name: str) -> None:
        insertion = open_insertion("postgresql").insertion
        with self._connection.transaction(), self._connection.pipeline():
            self._connection.execute("set local search_path = shop")
            for envelope in envelopes:
                self._connection.execute(*insertion(outbox_row("shop", envelope, None, FROM_OUTSIDE)))

    def is_taken_in(self) -> bool:
        return True  # the outbox is counted

    def count(self) -> tuple[int, ...] | None:
        found: tuple[int, ...] | None = self._connection.execute(_COUNTS).fetchone()
        return found

    @contextmanager
    def database(self) -> Iterator[Database]:
        with psycopg.connect(self._all) as connection:
            connection.read_only = True
            yield connection

    def change(self, statement: str) -> None:
        self._connection.execute(statement)


def _inside(url: str, *schemas: str) -> str:
    options = quote(f"-csearch_path={','.join(schemas)}")
    return f"{url}?options={options}"


@contextmanager
def rabbitmq_site(folder: Path, *, forgets: bool) -> Iterator[RabbitmqSite]:
    """Ready, and gone afterwards, with its servers. Raises `ConfigurationError` where one is not installed."""
    with private_rabbitmq() as rabbitmq, private_postgres() as postgres:
        rabbitmq.until_ready()
        site = RabbitmqSite(folder, postgres, rabbitmq, forgets=forgets)
        try:
            site.set_up()
            yield site
        finally:
            site.close()
