"""The Django example: an order by the ORM and its event are one commit, and so is an event alone."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import faregate as fg
from examples.django_shop.messages import OrderPlaced
from tests.examples.program import Program, count

ORDER = {"customer": "ann", "total": 40}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Django is set up once in a process, so all tests here share a database."""
    folder = tmp_path_factory.mktemp("django")
    import django
    from django.core.management import call_command

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_SHOP_DATA", str(folder))
        patch.setenv("DJANGO_SETTINGS_MODULE", "examples.django_shop.settings")
        patch.setenv("TZ", "UTC")  # as Django does it to the whole process
        django.setup()
        call_command("migrate", verbosity=0)
        with Program(folder, "-m", "faregate", "store", "init", "examples.django_shop.worker:bus") as tables:
            tables.line("its tables are made")
        yield folder
    time.tzset()


def test_the_models_have_their_migration(data: Path) -> None:
    from django.core.management import call_command

    call_command("makemigrations", "--check", "--dry-run", verbosity=0)


def test_a_rollback_takes_the_event_with_it(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.test import Client

    from examples.django_shop import views

    publish = views.publish

    def publish_and_fail(event: object, key: str) -> str:
        publish(event, key)
        assert count_open("faregate_outbox") == 1
        raise OSError("out of memory")

    monkeypatch.setattr(views, "publish", publish_and_fail)
    answer = Client(raise_request_exception=False).post("/orders", ORDER, "application/json", **key("order-0"))
    assert answer.status_code == 500
    assert count(data / "shop.db", "faregate_outbox") == count(data / "shop.db", "django_shop_order") == 0


def test_publishing_outside_of_a_transaction_is_refused(data: Path) -> None:
    from examples.django_shop import messages, views

    with pytest.raises(RuntimeError, match="atomic"):
        views.publish(messages.NewsletterWanted(email="ann@example.com"), "ann")


def test_orders_and_events_without_a_table_are_handled_once(data: Path) -> None:
    from django.test import Client

    client = Client()
    for _ in range(2):
        answer = client.post("/orders", ORDER, "application/json", **key("order-1"))
        assert answer.status_code == 201
        assert client.post("/newsletter", {"email": "ann@example.com"}, "application/json").status_code == 202
    assert client.post("/orders", ORDER, "application/json").status_code == 422
    with Program(data, "-m", "faregate", "run", "examples.django_shop.worker:bus") as worker:
        waiting = {"bill order", "subscribe"}
        while waiting:
            waiting.discard(worker.line("bill order|subscribe")[0])
        worker.drain()
    for table in ("django_shop_order", "invoices", "readers"):
        assert count(data / "shop.db", table) == 1, table


@pytest.mark.services
async def test_the_outbox_takes_the_connection_that_django_has_to_postgresql(data: Path, postgres_url: str) -> None:
    from django.db import connections, transaction
    from psycopg.conninfo import conninfo_to_dict

    parts = conninfo_to_dict(postgres_url)
    connections.databases["postgresql"] = connections.databases["default"] | {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.pop("dbname"),
        "HOST": parts.pop("host", ""),
        "PORT": parts.pop("port", ""),
        "USER": parts.pop("user", ""),
        "PASSWORD": parts.pop("password", ""),
        "OPTIONS": parts,
    }

    def publish(number: int, fails: bool) -> None:
        connection = connections["postgresql"]
        try:
            with transaction.atomic(using="postgresql"):
                connection.ensure_connection()
                outbox = fg.outbox(connection.connection, node="shop")
                outbox.publish(OrderPlaced(order_id=f"{number}", total=40), idempotency_key=f"{number}")
                if fails:
                    raise OSError("out of memory")
        finally:
            connection.close()

    shop, billing, billed = fg.Node("shop"), fg.Node("billing"), []

    @billing.on(OrderPlaced, source=shop)
    async def bill(order: OrderPlaced) -> None:
        billed.append(order.order_id)

    await fg.Bus("memory:", nodes=[shop], store=postgres_url).prepare()
    with pytest.raises(OSError, match="memory"):
        await asyncio.to_thread(publish, 1, True)
    await asyncio.to_thread(publish, 2, False)
    async with fg.Bus("memory:", nodes=[shop, billing], store=postgres_url) as bus:
        await bus.idle(timeout=30)
    assert billed == ["2"]


def key(text: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Idempotency-Key": text}}


def count_open(table: str) -> int:
    """As the transaction that is open sees it."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(f"select count(*) from {table}")
        found: int = cursor.fetchone()[0]
    return found
