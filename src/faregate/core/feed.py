"""Where messages come from. A role of the core, beside the delivery itself, which settles, releases and redelivers.

QueueFeed (bus)         a queue keeps what is not settled, and delivers it again
LeasedFeed (bus)        the same, and each commit holds the lease of the partition that it came from (`bus/leases.py`)
SuppliedFeed (bus)      the same, and the rows of what was parked go with the commit (`bus/supplied.py`)
LogFeed (Spark)         a log keeps everything: the node's store says how far it was handled, and parks what waits
StagedFeed (Spark)      the same without a store: the batch is read again as a whole, or not at all
"""

from collections.abc import Sequence
from typing import Protocol

from faregate.core.verdict import Verdict, judge
from faregate.core.work import Work
from faregate.node.rules import FailurePolicy
from faregate.ports.queue import Delivery
from faregate.ports.store import Transaction


class Feed(Protocol):
    batch_seconds: float
    """How long the messages of one transaction may take together, roughly: it is what the first of them waits."""
    keeps_outcomes: bool
    """Whether the outcome that a delivery is settled with is written down, where an audit finds it. Else the ledger
    notes what the filter did not take: nothing else would tell it from what was lost."""

    async def join(self, transaction: Transaction, works: Sequence[Work]) -> None:
        """First in every transaction: may find messages that an earlier run has dealt with."""

    async def record(self, transaction: Transaction, works: Sequence[Work]) -> None:
        """With the commit of these: how far they were handled. Raises `LeaseLost` when some are somebody else's."""

    async def dead_letter(self, transaction: Transaction, work: Work) -> None:
        """First in the commit that makes it a dead letter."""

    def judge(self, delivery: Delivery, exc: BaseException, policy: FailurePolicy) -> Verdict:
        """What becomes of a message whose tries are used up. Raises when everything has to stop instead."""


class QueueFeed:
    batch_seconds = 0.05
    keeps_outcomes = True

    async def join(self, transaction: Transaction, works: Sequence[Work]) -> None:
        """The queue knows what is out, and the dedup what was."""

    async def record(self, transaction: Transaction, works: Sequence[Work]) -> None:
        """The queue is told afterwards, by settling."""

    async def dead_letter(self, transaction: Transaction, work: Work) -> None:
        """The same."""

    def judge(self, delivery: Delivery, exc: BaseException, policy: FailurePolicy) -> Verdict:
        return judge(exc, delivery.redeliveries, policy)
