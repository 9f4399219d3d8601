"""The web service and the nodes behind it, in one process: `uvicorn --factory examples.web.app:create_app`.

The bus finds what requests commit to the outbox; requests know nothing of the bus.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel, Field

import faregate as fg

from .orders import SCHEMA, KeyReused, OrderPlaced, place_order, transaction

INVOICES = "create table if not exists invoices(order_id text primary key, total integer not null)"


class NewOrder(BaseModel):
    customer: str
    total: int = Field(gt=0)


def make_bus(folder: Path) -> fg.Bus:
    shop = fg.Node("shop", schema=SCHEMA)
    billing = fg.Node("billing", schema=INVOICES)

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced, ctx: fg.Context) -> None:
        ctx.db.write("insert into invoices values (?, ?)", (order.order_id, order.total))

    return fg.Bus(f"journal:{folder}/journal", nodes=[shop, billing], store=f"sqlite:{folder}/shop.db")


def create_app(folder: Path = Path("web-data")) -> FastAPI:
    """The web service on a folder. The database is set up by the bus, which runs as long as the service does."""
    database = folder / "shop.db"

    @asynccontextmanager
    async def run_bus(_: FastAPI) -> AsyncIterator[None]:
        folder.mkdir(exist_ok=True)
        async with make_bus(folder):
            yield

    app = FastAPI(title="shop", lifespan=run_bus)

    @app.post("/orders", status_code=201)
    def post_order(order: NewOrder, idempotency_key: Annotated[str, Header(min_length=1)]) -> dict[str, Any]:
        try:
            return place_order(database, idempotency_key, order.customer, order.total)
        except KeyReused:
            raise HTTPException(422, "this Idempotency-Key was used for another order: use a new one") from None

    @app.get("/invoices")
    def get_invoices() -> list[dict[str, Any]]:
        with transaction(database) as connection:
            rows = connection.execute("select order_id, total from invoices order by rowid").fetchall()
        return [{"order_id": order_id, "total": total} for order_id, total in rows]

    return app
