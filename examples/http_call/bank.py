"""A bank with an HTTP interface, as others run it: it honours `Idempotency-Key`, and is not always well.

Every third charge is made and the answer lost. A caller who then tries again with another key pays twice; the same key
gets the first answer.
"""

from collections import Counter
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel


class Charge(BaseModel):
    order_id: str
    amount: int


class Bank:
    def __init__(self) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        self.charged: Counter[str] = Counter()
        self.calls = 0
        self.limited = 0
        """How many of the next calls are refused with 429."""

    def charge(self, key: str, charge: Charge) -> dict[str, Any]:
        self.calls += 1
        if self.limited > 0:
            self.limited -= 1
            raise HTTPException(429, "too many requests", {"Retry-After": "5"})
        if charge.amount > 1_000:
            raise HTTPException(402, "the card has not that much")
        if charge.amount <= 0:
            raise HTTPException(422, "nothing to charge")
        if key not in self.answers:
            self.charged[charge.order_id] += 1
            self.answers[key] = {"charge_id": f"ch-{len(self.answers) + 1}"}
            if len(self.answers) % 3 == 0:
                raise HTTPException(504, "the charge was made, and the answer is lost")
        return self.answers[key]


def create_app(bank: Bank | None = None) -> FastAPI:
    bank = bank or Bank()
    app = FastAPI(title="bank")

    @app.post("/charges", status_code=201)
    def post_charge(charge: Charge, idempotency_key: Annotated[str, Header(min_length=1)]) -> dict[str, Any]:
        return bank.charge(idempotency_key, charge)

    return app
