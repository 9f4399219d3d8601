"""A bank that is slow and sometimes does not answer: the dependency that every real system has."""

import asyncio
from hashlib import sha256


class BankTimeout(Exception):
    """The bank did not answer in time. Trying again may help."""


class Bank:
    """Does not answer the first calls about some orders, and takes its time over some. Which ones depends on the order
    id only: every run is alike, also one whose process was killed in between."""

    def __init__(self, latency: float = 0.03, slow_percent: int = 3, failing_percent: int = 5) -> None:
        self._latency = latency
        self._slow_percent = slow_percent
        self._failing_percent = failing_percent
        self.timeouts = 0

    async def charge(self, order_id: str, call: int) -> None:
        """`call` numbers the calls about this order, as the caller counts them."""
        await asyncio.sleep(self._latency if self._chance(order_id)[2] % 100 < self._slow_percent else 0)
        if call <= self.failures_of(order_id):
            self.timeouts += 1
            raise BankTimeout(f"no answer about order {order_id} (call {call})")

    def failures_of(self, order_id: str) -> int:
        """How many calls for this order fail before one succeeds."""
        chance = self._chance(order_id)
        return chance[1] % 4 + 1 if chance[0] % 100 < self._failing_percent else 0

    @staticmethod
    def _chance(order_id: str) -> bytes:
        return sha256(order_id.encode()).digest()
