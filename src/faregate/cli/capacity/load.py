"""What is asked: how many messages, how large, for whom, and on what."""

import math
from dataclasses import dataclass
from typing import Literal

from faregate.errors import ConfigurationError

Engine = Literal["journal", "rabbitmq", "spark"]
Store = Literal["none", "sqlite", "postgresql"]

ENGINES: dict[Engine, str] = {
    "journal": "the bus on a journal",
    "rabbitmq": "the bus on RabbitMQ",
    "spark": "Spark on RabbitMQ streams",
}


@dataclass(frozen=True)
class Load:
    rate: float
    """Messages that are published in a second, from outside; those that handlers send come on top."""
    body: int = 200
    recipients: int = 1
    """Nodes that handle each message."""
    sent: float = 0.0
    """Messages that a handler sends for each one that it handles. That others handle them is a load of its own."""
    keyed: float = 1.0
    """The share of messages whose handlers ask for the order of a key."""
    keys: int = 100_000
    hot: float | None = None
    """The share of all messages that have the most frequent key; None: all keys are as frequent."""
    retain_days: float = 7.0
    ledger_days: float = 30.0
    engine: Engine = "rabbitmq"
    store: Store = "postgresql"

    def __post_init__(self) -> None:
        for name in ("rate", "body", "recipients", "keys"):
            _check(name, getattr(self, name), most=math.inf, zero=False)
        for name in ("sent", "retain_days", "ledger_days"):
            _check(name, getattr(self, name), most=math.inf)
        _check("keyed", self.keyed, most=1)
        if self.hot is not None:
            _check("hot", self.hot, most=self.keyed)
        if self.engine == "spark" and self.store == "sqlite":
            raise ConfigurationError(
                "SQLite is a file of one machine, and a cluster cannot share it: on Spark, plan with --store "
                "postgresql or none"
            )
        if self.store == "none" and self.keyed and self.engine == "rabbitmq":
            raise ConfigurationError(
                "on RabbitMQ the order of a key needs a store: plan with --store postgresql, or with --keyed 0"
            )

    @property
    def hottest(self) -> float:
        """The share of messages with the most frequent key."""
        return self.keyed / self.keys if self.hot is None else self.hot

    def told(self) -> str:
        nodes = "1 node" if self.recipients == 1 else f"{self.recipients} nodes"
        handled = "without a store" if self.store == "none" else f"with {_STORES[self.store]}"
        order = "none ordered" if not self.keyed else f"{self.keyed:.0%} ordered by {self.keys:,} keys"
        rate = f"{self.rate:,.0f}" if self.rate >= 1 else f"{self.rate:.3g}"
        return (
            f"{rate} messages a second of {self.body:,} B, {order}; each handled by {nodes} {handled}, "
            f"which {'sends' if self.recipients == 1 else 'send'} {self.sent:g} for each; {ENGINES[self.engine]}"
        )


_STORES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}


def _check(name: str, value: float, *, most: float, zero: bool = True) -> None:
    if not (0 <= value <= most and value < math.inf) or (value == 0 and not zero):
        low = "0 or more" if zero else "more than 0"
        limit = "" if most == math.inf else f", and at most {most:g}"
        raise ConfigurationError(f"--{name.replace('_', '-')} is {value:g}: it must be {low}{limit}")
