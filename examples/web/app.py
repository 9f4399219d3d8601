"""The web service: `uvicorn --factory examples.web.app:create_app --workers 4`.

It writes orders and their events into the database, and knows nothing of the bus, which runs in a process of its own:
`worker.py`. So it may have any number of processes, and may be started and stopped on its own.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel, Field

from .orders import KeyReused, data_folder, find_order, make_tables, place_order


class NewOrder(BaseModel):
    customer: str
    total: int = Field(gt=0)


def create_app(folder: Path | None = None) -> FastAPI:
    """The web service on a folder, by default the one that `WEB_DATA` names."""
    folder = folder or data_folder()
    database = folder / "shop.db"

    @asynccontextmanager
    async def prepare(_: FastAPI) -> AsyncIterator[None]:
        await make_tables(folder)
        yield

    app = FastAPI(title="shop", lifespan=prepare)

    @app.post("/orders", status_code=201)
    def post_order(order: NewOrder, idempotency_key: Annotated[str, Header(min_length=1)]) -> dict[str, Any]:
        try:
            return place_order(database, idempotency_key, order.customer, order.total)
        except KeyReused:
            raise HTTPException(422, "this Idempotency-Key was used for another order: use a new one") from None

    @app.get("/orders/{order_id}")
    def get_order(order_id: str) -> dict[str, Any]:
        found = find_order(database, order_id)
        if found is None:
            raise HTTPException(404, "there is no such order")
        return found

    return app
